"""Which of a run's checkpoints are of the history that it is on.

A run that was sent back to an earlier checkpoint has left what came after it, though that has more steps. Every start of
a run has a number, and checkpoints tell the number and the step of the start that wrote them. Clocks play no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from modalities.checkpointing.manifest import Manifest, Start, read_manifest
from modalities.exceptions import CheckpointError
from modalities.progress import TrainingProgress


class HasManifest(Protocol):
    """A checkpoint, as far as it matters here."""

    @property
    def path(self) -> Path: ...

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


def history_of(checkpoints: Iterable[C]) -> History[C]:
    """Tell the checkpoints of the present history from those that were left; manifests are read, no data.

    Args:
        checkpoints: Of one experiment, in any order.
    """
    known: list[tuple[Start, C]] = []
    damaged: list[C] = []
    for checkpoint in checkpoints:
        try:
            manifest = read_manifest(checkpoint.manifest_path)
        except CheckpointError:
            damaged.append(checkpoint)
        else:
            known.append((_start_of(manifest), checkpoint))
    known.sort(key=lambda item: (item[0].number, item[1].progress, item[1].path), reverse=True)
    current: list[C] = list(damaged)
    left: list[C] = []
    went_on_from = None
    for _, of_start in groupby(known, key=lambda item: item[0].number):
        begun_at = went_on_from
        for start, checkpoint in of_start:
            is_current = begun_at is None or checkpoint.progress.num_seen_steps <= begun_at
            (current if is_current else left).append(checkpoint)
            went_on_from = start.step if begun_at is None else min(begun_at, start.step)
    # a stable order: what is damaged is tried, and told, where its step belongs
    return History(sorted(current, key=_step, reverse=True), sorted(left, key=_step, reverse=True))


def next_start(checkpoints: Iterable[HasManifest], step: int) -> Start:
    """Of a run that goes on from a step.

    Args:
        checkpoints: That the run has written so far.
        step: Where it goes on.
    """
    number = 0
    for checkpoint in checkpoints:
        try:
            number = max(number, _start_of(read_manifest(checkpoint.manifest_path)).number)
        except CheckpointError:
            continue  # its number is lost; a later start of the run has a higher one
    return Start(number + 1, step)


def _start_of(manifest: Manifest | None) -> Start:
    return manifest.start if manifest is not None else Start()


def _step(checkpoint: HasManifest) -> int:
    return checkpoint.progress.num_seen_steps
