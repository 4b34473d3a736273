"""Checkpoints that are also copied to an archive, such as a slower and safer file system.

    modalities run --config config_files/training/quickstart.yaml \
        --import tutorials/custom_checkpointing/archived_saving.py \
        checkpoint_saving=archived checkpoint_saving.archive_path=/safe/place
"""

import shutil
from pathlib import Path
from typing import Annotated

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.checkpoint_saving import CheckpointSaving
from modalities.checkpointing.fsdp.fsdp_checkpoint_saving import DCPCheckpointSaving
from modalities.checkpointing.retention import SaveKMostRecentCheckpointsStrategy
from modalities.parallel.process_group import on_rank_zero
from modalities.progress import TrainingProgress
from modalities.registry import places
from modalities.registry.registry import register


class ArchivedCheckpointSaving(DCPCheckpointSaving):
    """Saves as DCP does, then copies the checkpoint; what retention deletes stays in the archive."""

    def __init__(self, checkpoint_path: Path, experiment_id: str, global_rank: int, archive_path: Path) -> None:
        super().__init__(checkpoint_path, experiment_id, global_rank)
        self.archive_path = archive_path

    def save_checkpoint(self, app_state: AppState, training_progress: TrainingProgress) -> Path:
        committed = super().save_checkpoint(app_state, training_progress)
        on_rank_zero(lambda: self._copy(committed))  # a mistake of rank 0 ends all ranks, with one message
        return committed

    def _copy(self, checkpoint: Path) -> None:
        unfinished = self.archive_path / f".{checkpoint.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(checkpoint, unfinished)
        unfinished.rename(self.archive_path / checkpoint.name)


@register("checkpoint_saving", "archived")
def archived(
    archive_path: Path,
    *,
    k: int = 2,
    checkpoint_path: Annotated[Path, places.CHECKPOINT_PATH],
    experiment_id: Annotated[str, places.EXPERIMENT_ID],
    global_rank: Annotated[int, places.GLOBAL_RANK],
) -> CheckpointSaving:
    """Each rank writes its own shards; the k newest checkpoints are kept, and all of them in the archive."""
    execution = ArchivedCheckpointSaving(checkpoint_path, experiment_id, global_rank, archive_path)
    return CheckpointSaving(SaveKMostRecentCheckpointsStrategy(k), execution)
