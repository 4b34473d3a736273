"""What a way of saving or loading checkpoints must offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.retention import SavedCheckpoint
from modalities.checkpointing.saving.description import RunContext
from modalities.progress import TrainingProgress


class CheckpointSavingExecutionABC(ABC):
    """How checkpoints are written, found and deleted.

    Args:
        checkpoint_path: Folder that holds the checkpoints.
        experiment_id: ID of the experiment, part of every checkpoint's name.

    Attributes:
        context: What checkpoints tell of the run.
        after_commit: Called on rank 0 by executions that may commit beside training, after each commit.
    """

    checkpoint_path: Path
    experiment_id: str
    context: RunContext = RunContext()
    after_commit: Callable[[], None] | None = None

    commits_beside_training = False
    """Whether it calls ``after_commit`` itself; if not, a checkpoint is committed when ``save_checkpoint`` returns."""

    @abstractmethod
    def save_checkpoint(self, app_state: AppState, training_progress: TrainingProgress) -> Path:
        """Write a checkpoint and make it the last one; all ranks call it together.

        Returns:
            The checkpoint: its folder, or its model file.

        Raises:
            CheckpointError: It, or the one before it, could not be written; nothing is left under its final name.
        """

    @abstractmethod
    def delete_checkpoint(self, training_progress: TrainingProgress) -> None:
        """Remove the checkpoint of that progress; a failure is a warning. Called on rank 0 only."""

    @abstractmethod
    def saved_checkpoints(self) -> list[SavedCheckpoint]:
        """This experiment's whole checkpoints on disk, oldest first. Called on rank 0 only."""

    def rehearse(self, app_state: AppState, num_kept: int | None) -> None:
        """Find out before the first step whether saving will work; all ranks call it together.

        Args:
            app_state: That will be saved.
            num_kept: How many checkpoints will lie on the disk at most, if that is known.

        Raises:
            CheckpointError: It will not.
        """
        return

    @property
    def has_failed(self) -> bool:
        """Whether a save beside training has failed on this rank, as far as is known; costs nothing."""
        return False

    @property
    def longest_save_s(self) -> float:
        """Seconds that the longest save beside training took until it was committed."""
        return 0.0

    def settle(self) -> None:
        """Wait for a save that is still being written; all ranks call it together.

        Raises:
            CheckpointError: It failed.
        """
        return

    def close(self) -> None:
        """Let go of the folder, at the end of a run; waits for a save that is still being written, and never raises."""
        return


class DistributedCheckpointLoadingIF(ABC):
    """Loading of a checkpoint that every rank reads its part of."""

    @abstractmethod
    def load_checkpoint_(self, app_state: AppState, checkpoint_dir_path: Path) -> AppState:
        """Load a checkpoint folder into the app state, in place."""


class FSDP1CheckpointLoadingIF(ABC):
    """Loading of full model and optimizer files that rank 0 reads."""

    @abstractmethod
    def load_model_checkpoint(self, model: nn.Module, file_path: Path) -> nn.Module:
        """Load a model file and wrap the model with FSDP."""

    @abstractmethod
    def load_optimizer_checkpoint_(
        self, optimizer: Optimizer, model: FullyShardedDataParallel, file_path: Path
    ) -> None:
        """Load an optimizer file into the optimizer, in place."""
