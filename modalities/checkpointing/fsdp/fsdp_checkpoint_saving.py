"""Saving checkpoints of FSDP1 and FSDP2 models."""

from __future__ import annotations

import shutil
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FullyShardedDataParallel

from modalities.checkpointing import paths
from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.commit import commit_folder, discard, remove, write_json
from modalities.checkpointing.failures import causes_of
from modalities.checkpointing.interfaces import CheckpointSavingExecutionABC
from modalities.checkpointing.resume_state import collect_resume_state, write_resume_state
from modalities.durability import atomic_file, temporary_path
from modalities.exceptions import CheckpointError
from modalities.parallel.fsdp1 import full_model_state_dict, full_optimizer_state_dict
from modalities.parallel.process_group import on_rank_zero
from modalities.progress import TrainingProgress


class CheckpointingEntityType(Enum):
    """What a checkpoint file holds.

    Attributes:
        MODEL (str): Parameters and buffers.
        OPTIMIZER (str): The optimizer's state.
    """

    MODEL = "model"
    OPTIMIZER = "optimizer"


class DCPCheckpointSaving(CheckpointSavingExecutionABC):
    """Saves through ``torch.distributed.checkpoint``: each rank writes its own shards into one folder.

    Works with FSDP2, FSDP1 and unsharded models. The folder appears under its name when it is whole.

    Args:
        checkpoint_path (Path): Folder that holds the checkpoints.
        experiment_id (str): ID of the experiment.
        global_rank (int): Rank of this process.
    """

    CHECKPOINT_FOLDER_STRUCTURE = paths.CHECKPOINT_FOLDER_STRUCTURE

    def __init__(self, checkpoint_path: Path, experiment_id: str, global_rank: int):
        self.checkpoint_path = checkpoint_path
        self.experiment_id = experiment_id
        self.global_rank = global_rank

    def save_checkpoint(self, app_state: AppState, training_progress: TrainingProgress) -> Path:
        final = self._folder(training_progress)
        temporary = temporary_path(final)
        on_rank_zero(lambda: _prepare(temporary))
        try:
            # single_file_per_rank and fsync are torch's defaults; overwriting never happens in a fresh folder
            dcp.save({"app": app_state}, storage_writer=dcp.FileSystemWriter(temporary, overwrite=False))
        except CheckpointException as error:
            on_rank_zero(lambda: remove(temporary))
            raise CheckpointError(f"the checkpoint {final} could not be written: {causes_of(error)}") from error
        resume_state = collect_resume_state(training_progress, app_state.rank_state)

        def commit() -> None:
            write_resume_state(temporary / paths.RESUME_STATE_FILE, resume_state)
            commit_folder(temporary, final)  # the commit point: from here on the checkpoint exists
            info = {"checkpoint_folder_path": str(final.absolute())}
            write_json(self.checkpoint_path / paths.LAST_CHECKPOINT_INFO, info)

        on_rank_zero(lambda: _writing(final, commit))
        return final

    def delete_checkpoint(self, training_progress: TrainingProgress) -> None:
        if self.global_rank == 0:
            discard(self._folder(training_progress))

    def saved_checkpoints(self) -> list[TrainingProgress]:
        return on_rank_zero(lambda: _saved(self.checkpoint_path, self.experiment_id, None))

    def _folder(self, progress: TrainingProgress) -> Path:
        return self.checkpoint_path / paths.checkpoint_name(self.experiment_id, progress)


class FSDP1CheckpointSaving(CheckpointSavingExecutionABC):
    """Saves full state dicts of an FSDP1 model and its optimizer, each in a file that rank 0 writes.

    The whole state passes through rank 0's memory; DCPCheckpointSaving does without.

    Args:
        checkpoint_path (Path): Folder that holds the checkpoints.
        experiment_id (str): ID of the experiment.
        global_rank (int): Rank of this process.
    """

    CHECKPOINT_STRUCTURE = paths.CHECKPOINT_STRUCTURE

    def __init__(self, checkpoint_path: Path, experiment_id: str, global_rank: int):
        self.checkpoint_path = checkpoint_path
        self.experiment_id = experiment_id
        self.global_rank = global_rank

    def save_checkpoint(self, app_state: AppState, training_progress: TrainingProgress) -> Path:
        model = app_state.model
        if not isinstance(model, FullyShardedDataParallel):
            raise CheckpointError(
                f"checkpoint_saving_execution fsdp1 needs a `model: fsdp1_wrapped`, got a {type(model).__name__}; "
                "use the variant dcp"
            )
        model_path = self._file(training_progress, CheckpointingEntityType.MODEL.value)
        optimizer_path = self._file(training_progress, CheckpointingEntityType.OPTIMIZER.value)
        on_rank_zero(lambda: _writing(model_path, lambda: self.checkpoint_path.mkdir(parents=True, exist_ok=True)))
        scheduler = app_state.lr_scheduler
        resume_state = collect_resume_state(
            training_progress, app_state.rank_state, scheduler.state_dict() if scheduler else None
        )
        optimizer_state = full_optimizer_state_dict(model, app_state.optimizer)

        def write_all_but_the_model() -> None:
            write_resume_state(self._file(training_progress, paths.RESUME_STATE_ENTITY), resume_state)
            _save(optimizer_state, optimizer_path)

        on_rank_zero(lambda: _writing(optimizer_path, write_all_but_the_model))
        model_state = full_model_state_dict(model)

        def commit() -> None:
            _save(model_state, model_path)  # the commit point: without its model file a checkpoint does not exist
            info = {
                "model_checkpoint_path": str(model_path.absolute()),
                "optimizer_checkpoint_path": str(optimizer_path.absolute()),
            }
            write_json(self.checkpoint_path / paths.LAST_CHECKPOINT_INFO, info)

        on_rank_zero(lambda: _writing(model_path, commit))
        return model_path

    def delete_checkpoint(self, training_progress: TrainingProgress) -> None:
        if self.global_rank != 0:
            return
        entities = [e.value for e in CheckpointingEntityType] + [paths.RESUME_STATE_ENTITY]
        for entity in entities:
            file = self._file(training_progress, entity)
            if file.exists() or entity == CheckpointingEntityType.MODEL.value:
                discard(file)

    def saved_checkpoints(self) -> list[TrainingProgress]:
        model = CheckpointingEntityType.MODEL.value
        return on_rank_zero(lambda: _saved(self.checkpoint_path, self.experiment_id, model))

    def _file(self, progress: TrainingProgress, entity: str) -> Path:
        return self.checkpoint_path / paths.checkpoint_name(self.experiment_id, progress, entity)


def _prepare(temporary: Path) -> None:
    """An empty folder under the temporary name; what a killed save left there goes."""

    def make() -> None:
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)

    _writing(temporary, make)


def _writing(path: Path, work: Any) -> None:
    try:
        work()
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint {path}: {error.strerror}") from error


def _save(state: dict[str, Any], path: Path) -> None:
    with atomic_file(path) as file:
        torch.save(state, file)


def _saved(folder: Path, experiment_id: str, entity: str | None) -> list[TrainingProgress]:
    if not folder.is_dir():
        return []
    parsed = (paths.parse_checkpoint_name(path) for path in folder.iterdir())
    found = [p for p in parsed if p is not None and p[:2] == (experiment_id, entity)]
    return sorted(progress for _, _, progress in found)
