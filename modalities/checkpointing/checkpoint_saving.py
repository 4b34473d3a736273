"""Saving checkpoints: a strategy says which, an execution says how."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.fsdp.fsdp_checkpoint_saving import DCPCheckpointSaving, FSDP1CheckpointSaving
from modalities.checkpointing.interfaces import CheckpointSavingExecutionABC
from modalities.checkpointing.manifest import Start
from modalities.checkpointing.retention import (
    CheckpointSavingStrategyIF,
    CombinedCheckpointSavingStrategy,
    SaveEveryKStepsCheckpointingStrategy,
    SaveKMostRecentCheckpointsStrategy,
)
from modalities.checkpointing.saving.description import RunContext
from modalities.checkpointing.saving.saver import Mode, SavingOptions
from modalities.checkpointing.uploading import Uploader
from modalities.parallel.process_group import on_rank_zero
from modalities.progress import TrainingProgress


class CheckpointSaving:
    """Writes due checkpoints and then removes those that may go.

    Args:
        checkpoint_saving_strategy: Which checkpoints are written and kept.
        checkpoint_saving_execution: How they are written.

    Attributes:
        config_hash: Of the run's canonical config; told by every manifest.
        start: Which of the run's starts this is; told by every manifest.
        config: What the run's config means, by key; told by every manifest.
    """

    def __init__(
        self,
        checkpoint_saving_strategy: CheckpointSavingStrategyIF,
        checkpoint_saving_execution: CheckpointSavingExecutionABC,
    ) -> None:
        self.strategy = checkpoint_saving_strategy
        self.execution = checkpoint_saving_execution
        self.config_hash: str | None = None
        self.start = Start()
        self.config: Mapping[str, Any] = {}

    @property
    def checkpoint_path(self) -> Path:
        """Folder that holds the checkpoints."""
        return self.execution.checkpoint_path

    @property
    def experiment_id(self) -> str:
        """ID of the experiment whose checkpoints these are."""
        return self.execution.experiment_id

    def rehearse(self, app_state: AppState) -> None:
        """Find out before the first step whether saving will work; all ranks must call it.

        Raises:
            CheckpointError: It will not.
        """
        if not self.strategy.is_off:
            self.execution.rehearse(app_state, self.strategy.num_kept)

    def save_checkpoint(
        self, training_progress: TrainingProgress, app_state: AppState, metrics: Mapping[str, float] | None = None
    ) -> Path | None:
        """Save if the strategy wants it; all ranks must call it.

        Args:
            training_progress: Where the run stands.
            app_state: What is saved.
            metrics: Of the evaluation at this step, by name.

        Returns:
            The checkpoint, which may still be being written, or None if none was due.

        Raises:
            CheckpointError: It, or the one before, could not be written.
        """
        if not self.strategy.should_save(training_progress):
            return None
        return self.save_now(training_progress, app_state, metrics)

    def save_now(
        self, training_progress: TrainingProgress, app_state: AppState, metrics: Mapping[str, float] | None = None
    ) -> Path | None:
        """Save though the strategy may not find it due, because the run is about to end."""
        if self.strategy.is_off:
            return None

        def retain() -> None:
            # a newer checkpoint of an earlier history is not this run's to delete
            newest = training_progress.num_seen_steps
            saved = [c for c in self.execution.saved_checkpoints() if c.progress.num_seen_steps <= newest]
            for superseded in self.strategy.to_delete(saved):
                if superseded.progress.num_seen_steps < newest:
                    self.execution.delete_checkpoint(superseded.progress)

        self.execution.context = RunContext(self.config_hash, dict(metrics or {}), self.start, self.config)
        self.execution.after_commit = retain
        path = self.execution.save_checkpoint(app_state, training_progress)
        if not self.execution.commits_beside_training:
            on_rank_zero(retain)
        return path

    @property
    def has_failed(self) -> bool:
        """Whether a save beside training has failed, as far as this rank knows."""
        return self.execution.has_failed

    @property
    def longest_save_s(self) -> float:
        """Seconds that the longest save beside training took until it was committed."""
        return self.execution.longest_save_s

    def settle(self) -> None:
        """Wait for a checkpoint that is still being written; all ranks must call it.

        Raises:
            CheckpointError: It could not be written.
        """
        self.execution.settle()

    def close(self) -> None:
        """Let go of the folder, at the end of a run, be it a good one or not."""
        self.execution.close()


def make_dcp_execution(
    checkpoint_path: Path,
    experiment_id: str,
    global_rank: int,
    mode: Mode | None,
    timeout_s: float,
    upload_to: str | None = None,
) -> DCPCheckpointSaving:
    """Builder of ``checkpoint_saving_execution: dcp``."""
    execution = DCPCheckpointSaving(checkpoint_path, experiment_id, global_rank)
    execution.options = SavingOptions(mode, timeout_s)
    if upload_to is not None and global_rank == 0:
        execution.uploader = Uploader(upload_to, timeout_s)
    return execution


def make_dcp_checkpoint_saving(
    k: int,
    every: int,
    checkpoint_path: Path,
    global_rank: int,
    experiment_id: str,
    mode: Mode | None,
    timeout_s: float,
    upload_to: str | None = None,
) -> CheckpointSaving:
    """Builder of ``checkpoint_saving: dcp``: saves every ``every`` steps, keeps the ``k`` newest."""
    execution = make_dcp_execution(checkpoint_path, experiment_id, global_rank, mode, timeout_s, upload_to)
    return CheckpointSaving(_every_keep_most_recent(every, k), execution)


def make_fsdp1_checkpoint_saving(
    k: int, every: int, checkpoint_path: Path, global_rank: int, experiment_id: str
) -> CheckpointSaving:
    """Builder of ``checkpoint_saving: fsdp1``: saves every ``every`` steps, keeps the ``k`` newest."""
    execution = FSDP1CheckpointSaving(checkpoint_path, experiment_id, global_rank)
    return CheckpointSaving(_every_keep_most_recent(every, k), execution)


def _every_keep_most_recent(every: int, k: int) -> CheckpointSavingStrategyIF:
    return CombinedCheckpointSavingStrategy(
        [SaveEveryKStepsCheckpointingStrategy(every), SaveKMostRecentCheckpointsStrategy(k)]
    )
