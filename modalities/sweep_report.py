"""What came out of a sweep: a table, and a plot of the training curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from modalities.sweep import JobResult

PLOT_FILE = "sweep.png"


def print_table(results: Sequence[JobResult], console: Console) -> None:
    """One row per job: what was swept, how it ended, its last losses; the best held-out loss is marked."""
    swept = _swept(results)
    names = list(dict.fromkeys(name for result in results for name in result.losses if not name.endswith("loss last")))
    table = Table(box=None, pad_edge=False)
    for column in ("job", *swept, *(_heading(name, names) for name in names), "time", "end"):
        is_text = column in ("job", "end", *swept)
        table.add_column(column, justify="left" if is_text else "right", overflow="fold", min_width=4)
    judged = next((name for name in names if not name.startswith("train ")), names[0] if names else None)
    finished = [r.losses[judged] for r in results if judged is not None and judged in r.losses]
    for result in results:
        values = _values(result)
        cells = [values.get(name, "") for name in swept]
        for name in names:
            loss = result.losses.get(name)
            mark = " *" if name == judged and loss is not None and loss == min(finished) else ""
            cells.append("" if loss is None else f"{loss:.4f}{mark}")
        end = "finished" if result.exit_code == 0 else f"exit code {result.exit_code}"
        table.add_row(result.job.name, *cells, f"{result.seconds:.0f} s", end)
    console.print(table)


def write_plot(results: Sequence[JobResult], folder: Path) -> Path | None:
    """The training curves of all jobs as a picture in the sweep's folder; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    swept = _swept(results)
    for result in results:
        if result.curve:
            values = _values(result)
            label = ", ".join(f"{name.rpartition('.')[2]}={values[name]}" for name in swept if name in values)
            axes.plot(*zip(*result.curve, strict=True), label=label or result.job.name, marker=".", markersize=3)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss (nats per token)")
    if axes.lines:
        axes.legend(fontsize="small")
    path = folder / PLOT_FILE
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _heading(name: str, names: list[str]) -> str:
    """``heldout loss`` where the data has one loss only."""
    tag = name.partition(" ")[0]
    return f"{tag} loss" if [other.partition(" ")[0] for other in names].count(tag) == 1 else name


def _values(result: JobResult) -> dict[str, str]:
    return {name.lstrip("+~"): value for name, _, value in (word.partition("=") for word in result.job.words)}


def _swept(results: Sequence[JobResult]) -> list[str]:
    """Names whose value is not the same in all jobs."""
    all_values = [_values(result) for result in results]
    names = list(dict.fromkeys(name for values in all_values for name in values))
    return [name for name in names if len({values.get(name) for values in all_values}) > 1]
