"""What a way of saving or loading checkpoints must offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from modalities.checkpointing.app_state import AppState
from modalities.progress import TrainingProgress


class CheckpointSavingExecutionABC(ABC):
    """How checkpoints are written, found and deleted. All ranks call every method together.

    Args:
        checkpoint_path: Folder that holds the checkpoints.
        experiment_id: ID of the experiment, part of every checkpoint's name.
    """

    checkpoint_path: Path
    experiment_id: str

    @abstractmethod
    def save_checkpoint(self, app_state: AppState, training_progress: TrainingProgress) -> Path:
        """Write a checkpoint and make it the last one.

        Returns:
            The committed checkpoint: its folder, or its model file.

        Raises:
            CheckpointError: It could not be written; nothing is left under its final name.
        """

    @abstractmethod
    def delete_checkpoint(self, training_progress: TrainingProgress) -> None:
        """Remove the checkpoint of that progress; a failure is a warning."""

    @abstractmethod
    def saved_checkpoints(self) -> list[TrainingProgress]:
        """Progress of this experiment's checkpoints on disk, oldest first."""


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
