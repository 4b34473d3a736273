"""What the thread of a save does: write this rank's file, agree with the other ranks, and on rank 0 commit."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from modalities.checkpointing.manifest import FileRecord
from modalities.checkpointing.safe_reading import METADATA_FILE
from modalities.checkpointing.saving.agreement import SaveAgreement, SaveFailed
from modalities.checkpointing.saving.planning import RankPlan
from modalities.checkpointing.saving.shard_files import write_index, write_shards
from modalities.checkpointing.saving.snapshot import Snapshot
from modalities.checkpointing.storage import Destination
from modalities.exceptions import CheckpointError

logger = logging.getLogger(__name__)

_NICENESS = 5
"""Training goes first where cores are scarce."""


@dataclass
class SaveTimes:
    """What a save took on this rank.

    Args:
        blocked_s: Training waited.
        snapshot_s: Of it, copying.
        write_s: Writing this rank's file, durable.
        commit_s: Waiting for the other ranks, and committing.
        cpu_s: Of the thread that writes.
        num_bytes: Of this rank's file.
    """

    blocked_s: float = 0.0
    snapshot_s: float = 0.0
    write_s: float = 0.0
    commit_s: float = 0.0
    cpu_s: float = 0.0
    num_bytes: int = 0


@dataclass
class WrittenState:
    """What rank 0 commits.

    Args:
        destination: Where the ranks have written.
        metadata: Of the tensors and values, complete.
        files: The ranks' files and ``.metadata``.
        rank_parts: What each rank passed beside the state, by rank.
    """

    destination: Destination
    metadata: Metadata
    files: dict[str, FileRecord]
    rank_parts: list[Any]


@dataclass
class Save:
    """A save in flight."""

    destination: Destination
    agreement: SaveAgreement
    plan: RankPlan
    tensors: list[Tensor]
    values: list[tuple[MetadataIndex, bytes]]
    rank_part: Any
    commit: Callable[[WrittenState], None]
    after_commit: Callable[[SaveTimes], None]
    snapshot: Snapshot | None
    started: float
    times: SaveTimes = field(default_factory=SaveTimes)
    error: CheckpointError | None = None
    thread: threading.Thread | None = None

    @property
    def waits(self) -> bool:
        """Whether training waits for it, since what is written is the state itself."""
        return self.snapshot is None


def carry_out(save: Save) -> None:
    """Write this rank's file, and agree; on rank 0 commit."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    agreement = save.agreement
    try:
        with agreement.beating():
            _write_and_agree(save)
    except BaseException as error:
        save.error = _tell(save, error)
        return
    save.times.cpu_s = time.thread_time()
    if agreement.rank == 0:
        try:
            save.after_commit(save.times)
        except Exception:
            # the other ranks know it as committed already, and it is
            logger.exception("%s is committed, but what was to follow failed", save.destination.final)


def _write_and_agree(save: Save) -> None:
    agreement = save.agreement
    if save.snapshot is not None:
        save.snapshot.wait()
    begun = time.perf_counter()
    agreement.tell_written((*_write_own_file(save), save.rank_part))
    written = time.perf_counter()
    save.times.write_s = written - begun
    if agreement.rank == 0:
        _gather_and_commit(save, agreement.results())
        agreement.tell_committed()
    else:
        agreement.wait_until_committed()
    save.times.commit_s = time.perf_counter() - written
    if save.waits:
        save.times.blocked_s = time.perf_counter() - save.started


def _write_own_file(save: Save) -> tuple[dict[str, FileRecord], dict[MetadataIndex, _StorageInfo]]:
    """Write this rank's file; gives its record, and where in it the values are."""
    plan, destination = save.plan, save.destination
    destination.begin()
    if not plan.tensors and not save.values:
        return {}, {}
    elements = ([tensor.cpu().contiguous()] for tensor in save.tensors)
    record, places = write_shards(plan, elements, save.values, destination.working, destination)
    save.times.num_bytes = record.size
    return {plan.file_name: record}, places


def _gather_and_commit(save: Save, results: list[Any]) -> None:
    assert save.plan.metadata is not None
    files: dict[str, FileRecord] = {}
    storage = dict(save.plan.metadata.storage_data)
    for files_of_rank, places, _ in results:
        files |= files_of_rank
        storage |= places
    destination = save.destination
    meta = StorageMeta(checkpoint_id=str(destination.final), save_id=save.agreement.save_id)
    metadata = replace(save.plan.metadata, storage_data=storage, storage_meta=meta)
    files[METADATA_FILE] = write_index(metadata, destination.working, destination)
    save.commit(WrittenState(destination, metadata, files, [part for _, _, part in results]))


def _tell(save: Save, error: BaseException) -> CheckpointError:
    """Tell the other ranks, clean up, and put the failure into words."""
    agreement = save.agreement
    if isinstance(error, SaveFailed):
        cause = str(error)
    else:
        cause = f"rank {agreement.rank}: {_cause_of(error)}"
        with suppress(RuntimeError):  # the store may have gone with the rank that held it
            agreement.tell_failure(cause)
            cause = agreement.failure() or cause
    if agreement.rank == 0:
        with suppress(RuntimeError):
            agreement.wait_for_the_others(min(10.0, max(0.0, agreement.deadline - time.monotonic())))
        save.destination.abandon()
    return failed(save, cause)


def failed(save: Save, cause: str) -> CheckpointError:
    """The error that tells of a save that came to nothing."""
    return CheckpointError(f"cannot write the checkpoint {save.destination.final}: {cause}")


def _cause_of(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    return str(error) or type(error).__name__
