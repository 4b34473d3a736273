"""Saving checkpoints: a strategy says which, an execution says how."""

from __future__ import annotations

from pathlib import Path

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.fsdp.fsdp_checkpoint_saving import DCPCheckpointSaving, FSDP1CheckpointSaving
from modalities.checkpointing.interfaces import CheckpointSavingExecutionABC
from modalities.checkpointing.retention import CheckpointSavingStrategyIF, SaveEveryKeepMostRecentStrategy
from modalities.progress import TrainingProgress


class CheckpointSaving:
    """Writes due checkpoints and then removes those that may go.

    Args:
        checkpoint_saving_strategy: Which checkpoints are written and kept.
        checkpoint_saving_execution: How they are written.
    """

    def __init__(
        self,
        checkpoint_saving_strategy: CheckpointSavingStrategyIF,
        checkpoint_saving_execution: CheckpointSavingExecutionABC,
    ) -> None:
        self.strategy = checkpoint_saving_strategy
        self.execution = checkpoint_saving_execution

    @property
    def checkpoint_path(self) -> Path:
        """Folder that holds the checkpoints."""
        return self.execution.checkpoint_path

    @property
    def experiment_id(self) -> str:
        """ID of the experiment whose checkpoints these are."""
        return self.execution.experiment_id

    def save_checkpoint(self, training_progress: TrainingProgress, app_state: AppState) -> Path | None:
        """Save if the strategy wants it; all ranks must call it.

        Returns:
            The committed checkpoint, or None if none was due.

        Raises:
            CheckpointError: It could not be written.
        """
        if not self.strategy.should_save(training_progress):
            return None
        return self.save_now(training_progress, app_state)

    def save_now(self, training_progress: TrainingProgress, app_state: AppState) -> Path | None:
        """Save though the strategy may not find it due, because the run is about to end."""
        if self.strategy.is_off:
            return None
        committed = self.execution.save_checkpoint(app_state, training_progress)
        # a newer checkpoint of an earlier history is not this run's to delete
        saved = [p for p in self.execution.saved_checkpoints() if p.num_seen_steps <= training_progress.num_seen_steps]
        for superseded in self.strategy.to_delete(saved):
            if superseded.num_seen_steps < training_progress.num_seen_steps:
                self.execution.delete_checkpoint(superseded)
        return committed


def make_dcp_checkpoint_saving(
    k: int, every: int, checkpoint_path: Path, global_rank: int, experiment_id: str
) -> CheckpointSaving:
    """Builder of ``checkpoint_saving: dcp``: saves every ``every`` steps, keeps the ``k`` newest."""
    execution = DCPCheckpointSaving(checkpoint_path, experiment_id, global_rank)
    return CheckpointSaving(SaveEveryKeepMostRecentStrategy(every, k), execution)


def make_fsdp1_checkpoint_saving(
    k: int, every: int, checkpoint_path: Path, global_rank: int, experiment_id: str
) -> CheckpointSaving:
    """Builder of ``checkpoint_saving: fsdp1``: saves every ``every`` steps, keeps the ``k`` newest."""
    execution = FSDP1CheckpointSaving(checkpoint_path, experiment_id, global_rank)
    return CheckpointSaving(SaveEveryKeepMostRecentStrategy(every, k), execution)
