"""Deleting checkpoints of a folder by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from modalities.checkpointing.catalogue import Entry, files_of
from modalities.checkpointing.history import history_of
from modalities.checkpointing.storage import discard

_LEFT_BEHIND = "the run has gone back behind it; delete it by hand if nobody wants it"


@dataclass
class Pruning:
    """What is done with each checkpoint of a folder.

    Args:
        kept: Good ones that stay.
        deleted: What goes.
        left: What stays though it does not count, and why.
    """

    kept: list[Entry] = field(default_factory=list)
    deleted: list[Entry] = field(default_factory=list)
    left: list[tuple[Entry, str]] = field(default_factory=list)


def plan_pruning(
    entries: Sequence[Entry], num_kept: int, *, with_damaged: bool, prove: Callable[[Entry], Entry]
) -> Pruning:
    """Keep the newest good checkpoints of each experiment; nothing is deleted yet.

    Args:
        entries: Fewest steps first.
        num_kept: Of each experiment, at least 1.
        with_damaged: Whether damaged ones go, too; never where no good one of the experiment remains.
        prove: Looks closer at one that would be kept: nothing goes because of one that turns out to be damaged.
    """
    pruning = Pruning()
    for experiment_id in dict.fromkeys(entry.checkpoint.experiment_id for entry in entries):
        own = [entry for entry in entries if entry.checkpoint.experiment_id == experiment_id]
        kept: list[Entry] = []
        damaged: list[Entry] = []
        history = history_of({entry.checkpoint: entry.start for entry in own})
        pruning.left += [(entry, _LEFT_BEHIND) for entry in reversed(own) if entry.checkpoint in history.left]
        for entry in reversed(own):
            if entry.checkpoint in history.left:
                continue
            if entry.state == "good" and len(kept) < num_kept:
                entry = prove(entry)
            if entry.state == "damaged":
                damaged.append(entry)
            elif entry.state != "good":
                pruning.left.append((entry, _why_left(entry)))
            elif len(kept) < num_kept:
                kept.append(entry)
            else:
                pruning.deleted.append(entry)
        pruning.kept += kept
        if with_damaged and kept:
            pruning.deleted += damaged
        else:
            hint = "--damaged deletes it" if kept else f"no good one of {experiment_id} is there"
            pruning.left += [(entry, f"{entry.verdict}; {hint}") for entry in damaged]
    return pruning


def delete(entry: Entry) -> bool:
    """Delete a checkpoint, first what makes it one.

    Returns:
        Whether it is gone.
    """
    there = files_of(entry.checkpoint, entry.kind)
    for path in there:
        discard(path)
    return not any(path.exists() for path in there)


def _why_left(entry: Entry) -> str:
    if entry.state == "unverified":
        return "it has no manifest; `modalities checkpoint adopt` makes it count"
    return entry.verdict
