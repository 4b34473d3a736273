"""Saving checkpoints of FSDP1 and FSDP2 models."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel

from modalities import durability
from modalities.checkpointing import paths
from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.interfaces import CheckpointSavingExecutionABC
from modalities.checkpointing.lock import keep_locked, lock, unlock
from modalities.checkpointing.manifest import FileRecord
from modalities.checkpointing.rehearsal import rehearse_space, rehearse_writing
from modalities.checkpointing.resume_state import (
    ResumeState,
    collect_resume_state,
    rank_part,
    resume_state_bytes,
    resume_state_of,
)
from modalities.checkpointing.retention import SavedCheckpoint
from modalities.checkpointing.safe_reading import read_state_file
from modalities.checkpointing.saving.checksummed_file import write_file_of
from modalities.checkpointing.saving.description import describe, mesh_of, tensor_record, tensors_in
from modalities.checkpointing.saving.full_files import save_full_model, save_full_optimizer
from modalities.checkpointing.saving.saver import DistributedSaver, SavingOptions
from modalities.checkpointing.saving.writer import SaveTimes, WrittenState
from modalities.checkpointing.storage import (
    Destination,
    as_location,
    commit_names,
    destination_of,
    discard,
    is_remote,
    point_at,
    remove,
    sweep,
)
from modalities.checkpointing.uploading import Uploader
from modalities.checkpointing.verification import saved_in
from modalities.durability import temporary_path, write_file
from modalities.exceptions import CheckpointError
from modalities.parallel.process_group import on_rank_zero
from modalities.progress import TrainingProgress

logger = logging.getLogger(__name__)

_PATIENCE_AT_FAILURE_S = 60


class CheckpointingEntityType(Enum):
    """What a checkpoint file holds.

    Attributes:
        MODEL (str): Parameters and buffers.
        OPTIMIZER (str): The optimizer's state.
    """

    MODEL = "model"
    OPTIMIZER = "optimizer"


class DCPCheckpointSaving(CheckpointSavingExecutionABC):
    """Saves in the layout of ``torch.distributed.checkpoint``: each rank writes its own shards into one folder.

    Works with FSDP2, FSDP1 and unsharded models. The folder appears under its name when it is whole.

    Args:
        checkpoint_path (Path): Folder that holds the checkpoints, or an fsspec URL.
        experiment_id (str): ID of the experiment.
        global_rank (int): Rank of this process.

    Attributes:
        options: How; by default ``save_checkpoint`` returns when the checkpoint is committed.
        uploader: Copies committed checkpoints elsewhere, on rank 0.
    """

    CHECKPOINT_FOLDER_STRUCTURE = paths.CHECKPOINT_FOLDER_STRUCTURE

    commits_beside_training = True

    def __init__(self, checkpoint_path: Path, experiment_id: str, global_rank: int):
        self.checkpoint_path = as_location(checkpoint_path)
        self.experiment_id = experiment_id
        self.global_rank = global_rank
        self.options = SavingOptions()
        self.uploader: Uploader | None = None
        self._saver: DistributedSaver | None = None

    def save_checkpoint(self, app_state: AppState, training_progress: TrainingProgress) -> Path:
        if self._saver is None:
            self._saver = DistributedSaver(self.options)
            on_rank_zero(lambda: _writing(self.checkpoint_path, lambda: _make_folder(self.checkpoint_path)))
        final = self._folder(training_progress)
        context, mesh, saver = self.context, mesh_of(app_state.model_parts), self._saver
        retain = self.after_commit

        def commit(written: WrittenState) -> None:
            destination, files = written.destination, written.files
            keep_locked(self.checkpoint_path, self.experiment_id)
            name = paths.RESUME_STATE_FILE
            resume_state = resume_state_of(training_progress, written.rank_parts)
            files[name] = write_file_of(destination.working / name, destination, resume_state_bytes(resume_state))
            tensors = tensors_in(written.metadata)
            manifest = describe("dcp", self.experiment_id, training_progress, context, mesh, files, tensors)
            destination.commit(manifest.to_bytes())
            point_at(self.checkpoint_path, {"checkpoint_folder_path": final})

        def after_commit(times: SaveTimes) -> None:
            _report(final, times)
            if self.uploader is not None:
                self.uploader.add(final)
            if retain is not None:
                retain()

        def place(save_id: str) -> Destination:
            return destination_of(final, save_id)

        saver.save({"app": app_state.state_dict()}, rank_part(app_state.rank_state), place, commit, after_commit)
        if saver.copies_beside_training:
            _wait_before_step(app_state, saver.wait_for_snapshot)
        return final

    def delete_checkpoint(self, training_progress: TrainingProgress) -> None:
        folder = self._folder(training_progress)
        if self.uploader is None or not self.uploader.needs(folder):
            discard(folder)

    def saved_checkpoints(self) -> list[SavedCheckpoint]:
        return saved_in(self.checkpoint_path, self.experiment_id, is_distributed=True)

    def rehearse(self, app_state: AppState, num_kept: int | None) -> None:
        _rehearse(self, app_state, num_kept)

    @property
    def has_failed(self) -> bool:
        return self._saver is not None and self._saver.has_failed

    @property
    def longest_save_s(self) -> float:
        return self._saver.longest_save_s if self._saver is not None else 0.0

    def settle(self) -> None:
        if self._saver is not None:
            self._saver.settle()

    def close(self) -> None:
        try:
            if self._saver is not None:
                # what is still in flight here was cut off by a failure elsewhere: the other ranks may be gone
                self._saver.settle_after_failure(_PATIENCE_AT_FAILURE_S)
        except CheckpointError as error:
            logger.warning("%s", error)
        if self.uploader is not None:
            self.uploader.close()
        _release(self)

    def _folder(self, progress: TrainingProgress) -> Path:
        return self.checkpoint_path / paths.checkpoint_name(self.experiment_id, progress)


class FSDP1CheckpointSaving(CheckpointSavingExecutionABC):
    """Saves full state dicts of an FSDP1 model and its optimizer, each in a file that rank 0 writes.

    One FSDP unit at a time passes through rank 0's memory; training waits meanwhile. The model's file is named last: it
    decides whether the checkpoint is there.

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
        self._is_open = False

    def save_checkpoint(self, app_state: AppState, training_progress: TrainingProgress) -> Path:
        model = app_state.model
        if not isinstance(model, FullyShardedDataParallel):
            raise CheckpointError(
                f"checkpoint_saving_execution fsdp1 needs a `model: fsdp1_wrapped`, got a {type(model).__name__}; "
                "use the variant dcp"
            )
        if is_remote(as_location(self.checkpoint_path)):
            raise CheckpointError(
                f"{self.checkpoint_path} is a URL: checkpoint_saving_execution fsdp1 writes to file systems only; "
                "use the variant dcp"
            )
        if not self._is_open:
            on_rank_zero(lambda: _writing(self.checkpoint_path, lambda: _make_folder(self.checkpoint_path)))
            self._is_open = True
        scheduler = app_state.lr_scheduler
        resume_state = collect_resume_state(
            training_progress, app_state.rank_state, scheduler.state_dict() if scheduler else None
        )
        names = {entity: self._file(training_progress, entity) for entity in paths.ENTITIES_OF_FSDP1}
        temporary = {entity: temporary_path(final) for entity, final in names.items()}
        try:
            self._write_and_commit(app_state, model, training_progress, resume_state, names, temporary)
        except CheckpointError as error:
            if self.global_rank == 0:
                for path in temporary.values():
                    remove(path)
            raise _cannot_write(names["model"], error) from error
        return names["model"]

    def _write_and_commit(
        self,
        app_state: AppState,
        model: FullyShardedDataParallel,
        progress: TrainingProgress,
        resume_state: ResumeState,
        names: dict[str, Path],
        temporary: dict[str, Path],
    ) -> None:
        records: dict[str, FileRecord | None] = {}

        def write_small_files() -> None:
            for path in temporary.values():
                remove(path)
            records["resume_state"] = write_file_of(
                temporary["resume_state"], durability.layer, resume_state_bytes(resume_state)
            )

        on_rank_zero(lambda: _writing(names["model"], write_small_files))
        layer = durability.layer
        records["optimizer"] = save_full_optimizer(model, app_state.optimizer, temporary["optimizer"], layer)
        records["model"] = save_full_model(model, temporary["model"], layer)

        def commit() -> None:
            keep_locked(self.checkpoint_path, self.experiment_id)
            files = {names[entity].name: record for entity, record in records.items() if record is not None}
            state = read_state_file(temporary["model"])
            tensors = {key: tensor_record(tensor.dtype, tensor.shape) for key, tensor in state.items()}
            manifest = describe("fsdp1", self.experiment_id, progress, self.context, {}, files, tensors)
            write_file(temporary["manifest"], manifest.to_bytes())
            commit_names([(temporary[entity], names[entity]) for entity in paths.ENTITIES_OF_FSDP1])
            pointed = {f"{entity}_checkpoint_path": names[entity] for entity in ("model", "optimizer")}
            point_at(self.checkpoint_path, pointed)

        on_rank_zero(lambda: _writing(names["model"], commit))

    def delete_checkpoint(self, training_progress: TrainingProgress) -> None:
        # the model's file first: without it the rest is no checkpoint
        for entity in reversed(paths.ENTITIES_OF_FSDP1):
            file = self._file(training_progress, entity)
            if file.exists() or entity == CheckpointingEntityType.MODEL.value:
                discard(file)

    def saved_checkpoints(self) -> list[SavedCheckpoint]:
        return saved_in(self.checkpoint_path, self.experiment_id, is_distributed=False)

    def rehearse(self, app_state: AppState, num_kept: int | None) -> None:
        _rehearse(self, app_state, num_kept)

    def close(self) -> None:
        _release(self)

    def _file(self, progress: TrainingProgress, entity: str) -> Path:
        return self.checkpoint_path / paths.checkpoint_name(self.experiment_id, progress, entity)


def _writing(path: Path, work: Callable[[], None]) -> None:
    """Do what may find the disk full, or closed to us."""
    try:
        work()
    except OSError as error:
        raise _cannot_write(path, error) from error


def _make_folder(folder: Path) -> None:
    if not is_remote(folder):
        durability.layer.make_folder(folder)


def _take_folder(folder: Path, experiment_id: str) -> None:
    """Make the folder, take it for this run, and clean up after one that was killed."""
    _make_folder(folder)
    lock(folder, experiment_id)
    for told in sweep(folder, experiment_id):
        logger.warning("%s", told)


def _release(execution: DCPCheckpointSaving | FSDP1CheckpointSaving) -> None:
    if execution.global_rank == 0:
        unlock(execution.checkpoint_path, execution.experiment_id)


def _rehearse(
    execution: DCPCheckpointSaving | FSDP1CheckpointSaving, app_state: AppState, num_kept: int | None
) -> None:
    folder = execution.checkpoint_path
    on_rank_zero(lambda: _writing(folder, lambda: _take_folder(folder, execution.experiment_id)))
    rehearse_writing(folder, execution.experiment_id)
    there = on_rank_zero(lambda: _num_bytes_of(folder, execution.experiment_id))
    rehearse_space(folder, app_state, num_kept, there)


def _num_bytes_of(folder: Path, experiment_id: str) -> int:
    """Of the run's own checkpoints, in whose place new ones will come."""
    if is_remote(folder):
        return 0
    own = [
        path for path in folder.iterdir() if (told := paths.parse_checkpoint_name(path)) and told[0] == experiment_id
    ]
    files = [file for path in own for file in (path, *path.rglob("*"))]
    return sum(file.lstat().st_size for file in files)


def _report(final: Path, times: SaveTimes) -> None:
    rate = times.num_bytes / 1e9 / times.write_s if times.write_s else 0.0
    logger.info(
        "committed %s: %.1f MB a rank; training waited %.3f s (snapshot %.3f s); written in %.3f s (%.2f GB/s), "
        "committed %.3f s later",
        final.name,
        times.num_bytes / 1e6,
        times.blocked_s,
        times.snapshot_s,
        times.write_s,
        rate,
        times.commit_s,
    )


def _wait_before_step(app_state: AppState, wait: Callable[[], None]) -> None:
    """Let the next optimizer step wait for the copy that an accelerator makes beside it, once."""

    def hook(*_: Any) -> None:
        wait()
        handle.remove()

    handle = app_state.optimizer.register_step_pre_hook(hook)


def _cannot_write(path: Path, error: Exception) -> CheckpointError:
    cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if cause.startswith("cannot write the checkpoint"):
        return CheckpointError(cause)
    return CheckpointError(f"cannot write the checkpoint {path}: {cause}")
