"""What ``modalities checkpoint`` writes, for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from modalities.cli.output import as_size, show_json, show_table

if TYPE_CHECKING:
    from modalities.checkpointing.adoption import Repair
    from modalities.checkpointing.catalogue import Catalogue, Entry
    from modalities.checkpointing.comparison import Difference
    from modalities.checkpointing.pruning import Pruning
    from modalities.checkpointing.reading.sources import Form, TensorSource


def show_catalogue(catalogue: Catalogue, as_json: bool) -> None:
    """Everything in a folder of checkpoints."""
    problem = catalogue.pointer.problem if catalogue.pointer is not None else None
    if as_json:
        leftovers = [{"path": str(x.path), "bytes": x.num_bytes, "what": x.what} for x in catalogue.leftovers]
        content = {
            "folder": str(catalogue.folder),
            "checkpoints": [_as_dict(entry) for entry in catalogue.entries],
            "leftovers": leftovers,
            "bytes": catalogue.num_bytes,
            "pointer_problem": problem,
        }
        show_json(content)
        return
    with_experiment = len({entry.checkpoint.experiment_id for entry in catalogue.entries}) > 1
    headers = ["step", "tokens", "saved", "size", "world", "kind", "state"]
    rows = []
    for entry in catalogue.entries:
        progress, state = entry.progress, entry.verdict + (" (last)" if entry.is_last else "")
        own = [progress.num_seen_steps, progress.num_seen_tokens, entry.saved_at, as_size(entry.num_bytes)]
        row = [*own, entry.world_size, entry.kind, state]
        rows.append([entry.checkpoint.experiment_id, *row] if with_experiment else row)
    show_table(["experiment", *headers] if with_experiment else headers, rows, ("step", "tokens", "size", "world"))
    for leftover in catalogue.leftovers:
        click.echo(f"left over: {leftover.path.name} ({as_size(leftover.num_bytes)}): {leftover.what}")
    click.echo(f"{_count(catalogue.entries)}, {as_size(catalogue.num_bytes)} in {catalogue.folder}")
    if problem is not None:
        click.echo(f"warning: {problem}; `modalities checkpoint repair` writes it anew", err=True)


def show_inspection(
    source: TensorSource,
    entry: Entry | None,
    forms: Mapping[str, Form | None],
    norm_of: Mapping[str, float],
    as_json: bool,
) -> None:
    """What is in one checkpoint.

    Args:
        source: The checkpoint.
        entry: What is known of it, if it is named like one of ours.
        forms: Of the keys to show.
        norm_of: Norms by key, empty if they were not asked for.
        as_json: For programs.
    """
    about: dict[str, Any] = {"path": str(source.path), "kind": source.kind} if entry is None else _as_dict(entry)
    if entry is not None and entry.manifest is not None:
        about |= {
            name: asdict(entry.manifest)[name] for name in ("versions", "mesh", "config_hash", "metrics", "files")
        }
    if as_json:
        keys = [
            {
                "key": key,
                "shape": None if form is None else form.shape,
                "dtype": None if form is None else form.dtype,
                "bytes": None if form is None else form.num_bytes,
                **({"norm": norm_of.get(key)} if norm_of else {}),
            }
            for key, form in forms.items()
        ]
        show_json({**about, "keys": keys})
        return
    for name, value in about.items():
        if name not in ("files", "findings", "state") and value not in (None, {}):
            text = ", ".join(f"{key} {inner}" for key, inner in value.items()) if isinstance(value, dict) else value
            click.echo(f"{name:<14} {text}")
    if entry is not None:
        click.echo(f"{'state':<14} {entry.verdict}")
    for file, record in about.get("files", {}).items():
        click.echo(f"{'file':<14} {file} ({as_size(record['size'])}, xxh3-128 {record['xxh3_128']})")
    rows = [
        [
            key,
            None if form is None else _shape(form),
            "value" if form is None else form.dtype,
            None if form is None else form.num_bytes,
            *([f"{norm_of[key]:.6g}" if key in norm_of else None] if norm_of else []),
        ]
        for key, form in forms.items()
    ]
    show_table(["key", "shape", "dtype", "bytes", *(["norm"] if norm_of else [])], rows, ("bytes", "norm"))
    tensors = [form for form in forms.values() if form is not None]
    size = as_size(sum(form.num_bytes for form in tensors))
    click.echo(f"{len(tensors)} tensors, {size}; {len(forms) - len(tensors)} other values")


def show_verdicts(entries: Sequence[Entry], level: str, as_json: bool) -> None:
    """What came out of verifying."""
    if as_json:
        show_json({"level": level, "checkpoints": [_as_dict(entry) for entry in entries]})
        return
    for entry in entries:
        looked_at = ""
        if entry.state == "good" and entry.manifest is not None:
            what = "checksums of" if level == "full" else "sizes of"
            looked_at = f" ({what} {len(entry.manifest.files)} files, {as_size(entry.manifest.num_bytes)})"
        click.echo(f"{entry.state:<10} {entry.checkpoint.path.name}{looked_at}")
        for finding in entry.findings:
            click.echo(f"  {finding}")


def show_differences(found: Sequence[Difference], left_out: Sequence[str], show_all: bool, as_json: bool) -> None:
    """How two checkpoints differ.

    Args:
        found: By key.
        left_out: Parts that were not compared.
        show_all: Equal ones, too.
        as_json: For programs.
    """
    counts = Counter(difference.status for difference in found)
    shown = [difference for difference in found if show_all or difference.status != "equal"]
    if as_json:
        show_json({"differences": [asdict(x) for x in shown], "counts": counts, "not_compared": left_out})
        return
    if shown:
        show_table(["key", "status", "A", "B", "max |A-B|", "|A-B| / |A|"], [_difference_row(x) for x in shown])
    click.echo(", ".join(f"{number} {_IN_WORDS[status]}" for status, number in sorted(counts.items())) or "no keys")
    for section in left_out:
        click.echo(f"not compared: {section}, which only one of them has")


def show_pruning(plan: Pruning, stuck: Sequence[Entry], dry_run: bool, as_json: bool) -> None:
    """What goes and what stays."""
    gone = [entry for entry in plan.deleted if entry not in stuck]
    freed = sum(entry.num_bytes for entry in gone)
    if as_json:
        content = {
            "dry_run": dry_run,
            "kept": [_as_dict(entry) for entry in plan.kept],
            "deleted": [_as_dict(entry) for entry in gone],
            "stuck": [_as_dict(entry) for entry in stuck],
            "left": [{**_as_dict(entry), "why": why} for entry, why in plan.left],
            "bytes": freed,
        }
        show_json(content)
        return
    for entry in plan.kept:
        click.echo(f"kept    {entry.checkpoint.path.name}")
    for entry, why in plan.left:
        click.echo(f"left    {entry.checkpoint.path.name}: {why}")
    verb = "would go" if dry_run else "deleted"
    for entry in gone:
        reason = f": {entry.verdict}" if entry.is_bad else ""
        click.echo(f"{verb} {entry.checkpoint.path.name} ({as_size(entry.num_bytes)}){reason}")
    for entry in stuck:
        click.echo(f"error: {entry.checkpoint.path} could not be deleted", err=True)
    click.echo(f"{_count(gone)}, {as_size(freed)} {'would be freed' if dry_run else 'freed'}")


def show_repair(done: Repair, as_json: bool) -> None:
    """Where the pointer points now."""
    chosen = None if done.chosen is None else str(done.chosen.checkpoint.path)
    if as_json:
        skipped = [_as_dict(entry) for entry in done.skipped]
        show_json({"pointer": str(done.pointer), "chosen": chosen, "skipped": skipped})
        return
    for entry in done.skipped:
        hint = "; `modalities checkpoint adopt` writes one" if entry.state == "unverified" else ""
        click.echo(f"skipped {entry.checkpoint.path.name}: {entry.verdict}{hint}")
    if chosen is None:
        click.echo(f"error: no checkpoint in {done.pointer.parent} passes; {done.pointer.name} is as it was", err=True)
    else:
        click.echo(f"{done.pointer} points at {chosen}")


_IN_WORDS = {
    "equal": "equal",
    "only in A": "only in A",
    "only in B": "only in B",
    "shape": "of another shape",
    "dtype": "of another dtype",
    "values": "of other values",
}


def _difference_row(difference: Difference) -> list[str | None]:
    a, b = difference.a, difference.b
    forms = [None if form is None else f"{form.dtype} {_shape(form)}" for form in (a, b)]
    numbers = [None if x is None else f"{x:.3g}" for x in (difference.max_abs, difference.relative)]
    note = f"{difference.status}: {difference.note}" if difference.note else difference.status
    return [difference.key, note, *forms, *numbers]


def _as_dict(entry: Entry) -> dict[str, Any]:
    return {
        "path": str(entry.checkpoint.path),
        "kind": entry.kind,
        "experiment_id": entry.checkpoint.experiment_id,
        "progress": asdict(entry.progress),
        "saved_at": entry.saved_at,
        "bytes": entry.num_bytes,
        "world_size": entry.world_size,
        "is_last": entry.is_last,
        "state": entry.state,
        "findings": [asdict(finding) for finding in entry.findings],
    }


def _shape(form: Form) -> str:
    return "x".join(map(str, form.shape)) or "scalar"


def _count(entries: Sequence[Entry]) -> str:
    return f"{len(entries)} checkpoint{'' if len(entries) == 1 else 's'}"
