"""Which checkpoints are written and which are kept: pure policy, no disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from modalities.exceptions import UserError
from modalities.progress import TrainingProgress


class CheckpointSavingStrategyIF(ABC):
    """A policy of keeping checkpoints. It holds no state, so that a restarted run decides as an unbroken one."""

    @abstractmethod
    def should_save(self, training_progress: TrainingProgress) -> bool:
        """Whether a checkpoint is due; every rank must come to the same answer."""

    @property
    def is_off(self) -> bool:
        """Whether the user wants no checkpoints at all, not even at the end of a run."""
        return False

    @abstractmethod
    def to_delete(self, saved: Sequence[TrainingProgress]) -> list[TrainingProgress]:
        """Which checkpoints may go.

        Args:
            saved: What lies on the disk, oldest first; the last one was just committed.
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

    def should_save(self, training_progress: TrainingProgress) -> bool:
        return self.k != 0

    def to_delete(self, saved: Sequence[TrainingProgress]) -> list[TrainingProgress]:
        return list(saved[: -self.k]) if self.k > 0 else []


class SaveEveryKeepMostRecentStrategy(SaveKMostRecentCheckpointsStrategy):
    """Save when the number of steps is a multiple of ``every``, and keep the newest.

    Args:
        every: Steps between two checkpoints.
        k: How many are kept; -1 keeps all, 0 saves none.
    """

    def __init__(self, every: int, k: int) -> None:
        super().__init__(k)
        if every < 1:
            raise UserError(f"every is {every}; it must be at least 1 step")
        self.every = every

    def should_save(self, training_progress: TrainingProgress) -> bool:
        return super().should_save(training_progress) and training_progress.num_seen_steps % self.every == 0


class SaveEveryKStepsCheckpointingStrategy(CheckpointSavingStrategyIF):
    """Save when the number of steps is a multiple of k, and keep all.

    Args:
        k: Steps between two checkpoints.
    """

    def __init__(self, k: int) -> None:
        if k < 1:
            raise UserError(f"k is {k}; it must be at least 1 step")
        self.k = k

    def should_save(self, training_progress: TrainingProgress) -> bool:
        return training_progress.num_seen_steps % self.k == 0

    def to_delete(self, saved: Sequence[TrainingProgress]) -> list[TrainingProgress]:
        return []
