"""Every layout to every other: what is equal when a run goes on in another wrapper and another world.

``python -m tests.training.resuming_matrix`` runs the whole matrix (some forty minutes on two cores) and prints the table of
docs/resuming.md; ``--settings 2`` takes two opposite ones of optimizer, tying and micro-batches only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modalities.checkpointing.comparison import compare
from modalities.checkpointing.discovery import checkpoints_in
from modalities.checkpointing.fsdp.fsdp_checkpoint_saving import DCPCheckpointSaving
from modalities.checkpointing.reading.sources import open_source
from modalities.checkpointing.restoring import restore_
from modalities.factory.build import build
from modalities.parallel.process_group import global_rank
from modalities.run import RunRequest, compose, plan_of, run
from modalities.testing.ranks import run_on_ranks
from modalities.testing.tiny import component, tiny_config, write_config
from modalities.training.recipe import TrainingRecipe

HALFWAY, END = 2, 4
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Layout:
    """A wrapper and a world."""

    wrapper: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.wrapper} x {self.world_size}"


@dataclass(frozen=True)
class Setting:
    """What is trained, and how."""

    optimizer: str = "adam_w"
    is_tied: bool = True
    num_micro_batches: int = 2

    def __str__(self) -> str:
        return f"{self.optimizer}, {'tied' if self.is_tied else 'untied'}, {self.num_micro_batches} micro-batches"


@dataclass(frozen=True)
class Outcome:
    """How a resumed run compares with the unbroken one.

    Args:
        parted_state: Keys that are not bitwise those of the checkpoint, once they are loaded and saved again.
        has_same_course: Whether tokens, samples, steps and learning rates are equal.
        loss_difference: The largest, over steps and evaluation.
    """

    parted_state: tuple[str, ...]
    has_same_course: bool
    loss_difference: float


LAYOUTS = [Layout(wrapper, size) for wrapper in ("fsdp1", "fsdp2") for size in (1, 2, 4)] + [Layout("hsdp", 4)]
_ALL = [Setting(*values) for values in itertools.product(("adam", "adam_w"), (True, False), (1, 2))]
SETTINGS = [setting for pair in zip(_ALL, reversed(_ALL), strict=True) for setting in pair][: len(_ALL)]
"""Each followed by its opposite."""


def write(layout: Layout, setting: Setting, folder: Path) -> Path:
    """The config of a run; the same training whatever the layout. The vocabulary does not divide by any world."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = tiny_config(
        folder,
        wrapper="fsdp1" if layout.wrapper == "fsdp1" else "fsdp2",
        num_steps=END,
        checkpointing_interval=HALFWAY,
        global_batch=8,
        gradient_accumulation_steps=setting.num_micro_batches,
        num_tokens=16 * 21 + 1,
        vocab_size=131,
        use_weight_tying=setting.is_tied,
    )
    tree["optimizer"]["variant_key"] = setting.optimizer
    tree["optimizer"]["config"]["lr"] = LEARNING_RATE
    tree["lr_scheduler"]["config"] |= {"max_lr": LEARNING_RATE, "initial_lr": LEARNING_RATE / 10}
    if layout.wrapper == "hsdp":
        degrees = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": layout.world_size // 2}
        tree["device_mesh"]["config"] |= degrees
    execution = component(
        "checkpoint_saving_execution",
        "dcp",
        checkpoint_path="${modalities_env:experiments_root_path}/${modalities_env:experiment_id}/checkpoints",
        experiment_id="${modalities_env:experiment_id}",
        global_rank="${cuda_env:RANK}",
    )
    tree["checkpoint_saving"]["config"]["checkpoint_saving_execution"] = execution
    return write_config(tree, folder / f"{layout.wrapper}.yaml")


def train(layout: Layout, setting: Setting, folder: Path) -> Path:
    """An unbroken run.

    Returns:
        Its folder.
    """
    name = f"{layout.wrapper}-{layout.world_size}"
    request = RunRequest(write(layout, setting, folder), folder, name)
    run_on_ranks(_quietly, layout.world_size, request, None)
    return folder / name


def resume(before: Path, layout: Layout, setting: Setting, folder: Path) -> Outcome:
    """Go on from another run's checkpoint at half its way, and compare."""
    name = f"{before.name}-to-{layout.wrapper}-{layout.world_size}"
    halfway = checkpoints_in(before / "checkpoints")[0].path
    request = RunRequest(write(layout, setting, folder), folder, name, str(halfway))
    run_on_ranks(_quietly, layout.world_size, request, folder / f"again-{name}")
    (again,) = checkpoints_in(folder / f"again-{name}")
    differences = compare(open_source(halfway), open_source(again.path))
    parted = tuple(difference.key for difference in differences if difference.status != "equal")
    unbroken = [result for result in _results(before) if result["num_train_steps_done"] > HALFWAY]
    resumed = _results(folder / name)
    return Outcome(parted, _course(unbroken) == _course(resumed), _largest_difference(unbroken, resumed))


def _quietly(request: RunRequest, again: Path | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if again is not None:
            _load_and_save(request, again)
        run(request)


def _load_and_save(request: RunRequest, folder: Path) -> None:
    """What is loaded, saved as it is, by another layout than wrote it."""
    recipe = build(plan_of(compose(request)), TrainingRecipe)
    (checkpoint,) = checkpoints_in(Path(request.resume).parent, None)[:1]
    restore_(recipe.app_state, checkpoint)
    DCPCheckpointSaving(folder, checkpoint.experiment_id, global_rank()).save_checkpoint(
        recipe.app_state, checkpoint.progress
    )


def _results(run_folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def _course(results: list[dict[str, Any]]) -> list[Any]:
    return [
        (
            r["dataloader_tag"],
            r["num_train_steps_done"],
            r["metrics"].get("consumed tokens"),
            r["throughput_metrics"].get("lr mean"),
        )
        for r in results
    ]


def _largest_difference(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    losses = [[loss for result in results for loss in result["losses"].values()] for results in (one, other)]
    return max(abs(a - b) for a, b in zip(*losses, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=int, default=len(SETTINGS), help="how many of the settings")
    settings = SETTINGS[: parser.parse_args().settings]
    outcomes: dict[tuple[Layout, Layout], list[Outcome]] = {}
    for setting in settings:
        with tempfile.TemporaryDirectory() as folder:
            for before in LAYOUTS:
                trained = train(before, setting, Path(folder))
                for after in LAYOUTS:
                    outcomes.setdefault((before, after), []).append(resume(trained, after, setting, Path(folder)))
    print("| from \\ to | " + " | ".join(map(str, LAYOUTS)) + " |")
    print("| --- " * (len(LAYOUTS) + 1) + "|")
    for before in LAYOUTS:
        print(f"| {before} | " + " | ".join(_cell(outcomes[before, after]) for after in LAYOUTS) + " |")
    print(f"\n{sum(map(len, outcomes.values()))} pairs of runs")


def _cell(outcomes: list[Outcome]) -> str:
    if any(outcome.parted_state or not outcome.has_same_course for outcome in outcomes):
        return "DIFFERENT"
    worst = max(outcome.loss_difference for outcome in outcomes)
    return "bitwise" if worst == 0 else f"{worst:.1e}"


if __name__ == "__main__":
    main()
