"""Which checkpoints are written and which are kept: pure policy, no disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from modalities.exceptions import UserError
from modalities.progress import TrainingProgress


@dataclass(frozen=True, order=True)
class SavedCheckpoint:
    """A checkpoint on the disk.

    Args:
        progress: Counters at the time of saving.
        saved_at: When, if it tells.
        metrics: Of the evaluation at its step, by name; empty if there was none.
    """

    progress: TrainingProgress
    saved_at: datetime | None = field(default=None, compare=False)
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)


class CheckpointSavingStrategyIF(ABC):
    """A policy of keeping checkpoints. It holds no state, so that a restarted run decides as an unbroken one."""

    @abstractmethod
    def should_save(self, training_progress: TrainingProgress) -> bool:
        """Whether a checkpoint is due; every rank must come to the same answer."""

    @property
    def is_off(self) -> bool:
        """Whether the user wants no checkpoints at all, not even at the end of a run."""
        return False

    @property
    def chooses_when(self) -> bool:
        """Whether it has a say in when checkpoints are written; if not, ``should_save`` is always true."""
        return True

    @property
    def chooses_what(self) -> bool:
        """Whether it has a say in what is kept; if not, ``to_delete`` is always empty."""
        return True

    @property
    def num_kept(self) -> int | None:
        """How many checkpoints are kept at most; None if there is no bound."""
        return None

    @property
    def metrics(self) -> Sequence[str]:
        """Names of the metrics that it goes by."""
        return ()

    @abstractmethod
    def to_delete(self, saved: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        """Which checkpoints may go.

        Args:
            saved: What lies on the disk, oldest first; the last one was just committed and is never deleted.
        """


class SaveKMostRecentCheckpointsStrategy(CheckpointSavingStrategyIF):
    """Save each time it is asked, and keep the newest.

    Args:
        k: How many are kept; -1 keeps all, 0 saves none.
    """

    def __init__(self, k: int) -> None:
        if k < -1:
            raise UserError(f"k is {k}; it must be -1 (keep all), 0 (save none) or the number of checkpoints to keep")
        self.k = k

    @property
    def is_off(self) -> bool:
        return self.k == 0

    @property
    def chooses_when(self) -> bool:
        return False

    @property
    def num_kept(self) -> int | None:
        return self.k if self.k >= 0 else None

    def should_save(self, training_progress: TrainingProgress) -> bool:
        return self.k != 0

    def to_delete(self, saved: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        return list(saved[: -self.k]) if self.k > 0 else []


class SaveEveryKStepsCheckpointingStrategy(CheckpointSavingStrategyIF):
    """Save when the number of steps is a multiple of k, and keep all.

    Args:
        k: Steps between two checkpoints.
    """

    def __init__(self, k: int) -> None:
        if k < 1:
            raise UserError(f"k is {k}; it must be at least 1 step")
        self.k = k

    @property
    def chooses_what(self) -> bool:
        return False

    def should_save(self, training_progress: TrainingProgress) -> bool:
        return training_progress.num_seen_steps % self.k == 0

    def to_delete(self, saved: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        return []


class _KeepingStrategy(CheckpointSavingStrategyIF):
    """Has a say only in what is kept."""

    @property
    def chooses_when(self) -> bool:
        return False

    def should_save(self, training_progress: TrainingProgress) -> bool:
        return True

    def to_delete(self, saved: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        kept = self.to_keep(saved)
        return [checkpoint for checkpoint in saved[:-1] if checkpoint not in kept]

    @abstractmethod
    def to_keep(self, saved: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        """What this strategy wants kept."""


class KeepEveryNStepsStrategy(_KeepingStrategy):
    """Keep milestones for good: checkpoints whose number of steps is a multiple of n.

    Args:
        n: Steps between two milestones.
    """

    def __init__(self, n: int) -> None:
        if n < 1:
            raise UserError(f"n is {n}; it must be at least 1 step")
        self.n = n

    def to_keep(self, saved: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        return [checkpoint for checkpoint in saved if checkpoint.progress.num_seen_steps % self.n == 0]


class KeepBestKStrategy(_KeepingStrategy):
    """Keep the checkpoints with the best values of a metric; of equal ones the newer.

    While fewer have been measured, the newest of those that were not are kept in their place.

    Args:
        k: How many.
        metric: Its name, such as ``heldout loss``.
        best: Whether the lowest or the highest value is best.
    """

    def __init__(self, k: int, metric: str, best: Literal["lowest", "highest"] = "lowest") -> None:
        if k < 1:
            raise UserError(f"k is {k}; it must be at least 1 checkpoint")
        self.k, self.metric, self.best = k, metric, best

    @property
    def num_kept(self) -> int | None:
        return self.k + 1  # the newest, too

    @property
    def metrics(self) -> Sequence[str]:
        return (self.metric,)

    def to_keep(self, saved: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        sign = 1 if self.best == "lowest" else -1
        # a value that is no number is nobody's best
        measured = [c for c in saved if c.metrics.get(self.metric, float("nan")) == c.metrics.get(self.metric)]
        ranked = sorted(measured, key=lambda c: (sign * c.metrics[self.metric], -c.progress.num_seen_steps))
        unmeasured = [c for c in reversed(saved) if self.metric not in c.metrics]
        return [*ranked[: self.k], *unmeasured[: max(0, self.k - len(ranked))]]


class KeepOnePerPeriodStrategy(_KeepingStrategy):
    """Keep the first checkpoint of every period of time, such as one a day.

    Args:
        hours: Length of a period.
    """

    def __init__(self, hours: float) -> None:
        if hours <= 0:
            raise UserError(f"hours is {hours}; it must be above 0")
        self.hours = hours

    def to_keep(self, saved: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        first: dict[int, SavedCheckpoint] = {}
        for checkpoint in saved:
            if checkpoint.saved_at is not None:
                first.setdefault(int(checkpoint.saved_at.timestamp() // (3600 * self.hours)), checkpoint)
        return list(first.values())


class CombinedCheckpointSavingStrategy(CheckpointSavingStrategyIF):
    """Save when any of the strategies that choose when wants it; keep what any that chooses what wants kept.

    Args:
        strategies: At least one.
    """

    def __init__(self, strategies: Sequence[CheckpointSavingStrategyIF]) -> None:
        if not strategies:
            raise UserError("strategies is empty; name at least one")
        self.strategies = list(strategies)

    @property
    def is_off(self) -> bool:
        return any(strategy.is_off for strategy in self.strategies)

    @property
    def num_kept(self) -> int | None:
        bounds = [strategy.num_kept for strategy in self.strategies if strategy.chooses_what]
        return None if not bounds or None in bounds else sum(bound for bound in bounds if bound is not None)

    @property
    def metrics(self) -> Sequence[str]:
        return [name for strategy in self.strategies for name in strategy.metrics]

    def should_save(self, training_progress: TrainingProgress) -> bool:
        choosing = [strategy for strategy in self.strategies if strategy.chooses_when]
        return not self.is_off and (not choosing or any(s.should_save(training_progress) for s in choosing))

    def to_delete(self, saved: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        choosing = [strategy.to_delete(saved) for strategy in self.strategies if strategy.chooses_what]
        return [c for c in saved[:-1] if choosing and all(c in deleted for deleted in choosing)]
