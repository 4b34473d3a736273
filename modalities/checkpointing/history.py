"""Which of a run's checkpoints are of the history that it is on.

A run that was sent back to an earlier checkpoint has left what came after it, though that has more steps. Every start of
a run has a number, and tells which start it went on from, and at which step. Clocks play no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from modalities.checkpointing.manifest import Manifest, Start, read_manifest
from modalities.exceptions import CheckpointError
from modalities.progress import TrainingProgress


class HasManifest(Protocol):
    """A checkpoint, as far as it matters here."""

    @property
    def progress(self) -> TrainingProgress: ...

    @property
    def manifest_path(self) -> Path: ...


C = TypeVar("C", bound=HasManifest)


@dataclass(frozen=True)
class History(Generic[C]):
    """Checkpoints of one experiment.

    Args:
        current: Newest first: what to go on from, and to go back to. Those whose manifest is damaged are among them.
        left: What the run has gone back behind, newest first.
    """

    current: Sequence[C]
    left: Sequence[C]


def history_of(starts: Mapping[C, Start | None], others: Iterable[Start] = ()) -> History[C]:
    """Tell the checkpoints of the present history from those that were left.

    The present history is that of the start with the highest number: its checkpoints, those of the start that it went on
    from up to where it did, and so on.

    Args:
        starts: That wrote the checkpoints of one experiment, as :func:`starts_of` tells; None where it cannot be told.
        others: That are known otherwise, since they may not have written a checkpoint yet.
    """
    by_number: dict[int, list[C]] = {}
    damaged: list[C] = []
    known = {start.number: start for start in others}
    for checkpoint, start in starts.items():
        if start is None:
            damaged.append(checkpoint)
        else:
            by_number.setdefault(start.number, []).append(checkpoint)
            known.setdefault(start.number, start)
    current: list[C] = list(damaged)
    left: list[C] = []
    on_the_way = _way_back(known)
    for number, of_start in by_number.items():
        last = on_the_way.get(number, -1)
        for checkpoint in of_start:
            (current if last is None or _step(checkpoint) <= last else left).append(checkpoint)
    if not current:
        # nothing is known to be better than what has no manifest
        current, left = (
            by_number.get(0, []),
            [checkpoint for checkpoint in left if checkpoint not in by_number.get(0, [])],
        )
    # a stable order: what is damaged is tried, and told, where its step belongs
    return History(sorted(current, key=_step, reverse=True), sorted(left, key=_step, reverse=True))


def _way_back(known: Mapping[int, Start]) -> dict[int, int | None]:
    """For each start of the present history the last step that belongs to it; None if all do."""
    way: dict[int, int | None] = {}
    number, last = max(known, default=0), None
    while number not in way:
        way[number] = last
        start = known.get(number)
        if start is None:
            break
        last = start.step if last is None else min(last, start.step)
        number = start.parent
    # from before starts were counted
    way.setdefault(0, last)
    return way


def next_start(known: Iterable[Start | None], origin: Manifest | None, step: int) -> Start:
    """Of a run that goes on from a step.

    Args:
        known: The run's starts so far.
        origin: Manifest of the checkpoint that it goes on from, if there is one.
        step: Where it goes on.
    """
    parent = start_of(origin).number
    return Start(max([parent, *(start.number for start in known if start is not None)]) + 1, step, parent)


def starts_of(checkpoints: Iterable[C]) -> dict[C, Start | None]:
    """Which start wrote each checkpoint; None where the manifest is damaged. Manifests are read, no data."""
    starts: dict[C, Start | None] = {}
    for checkpoint in checkpoints:
        try:
            starts[checkpoint] = start_of(read_manifest(checkpoint.manifest_path))
        except CheckpointError:
            starts[checkpoint] = None
    return starts


def start_of(manifest: Manifest | None) -> Start:
    """The start that a manifest tells; without one it is from before starts were counted."""
    return manifest.start if manifest is not None else Start()


def _step(checkpoint: HasManifest) -> int:
    return checkpoint.progress.num_seen_steps
