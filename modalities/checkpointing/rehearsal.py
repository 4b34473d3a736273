"""Finding out before the first step what would otherwise be found out at the first checkpoint, hours later."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from modalities import durability
from modalities.checkpointing import paths
from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.storage import is_remote
from modalities.durability import remove_tree, write_file
from modalities.exceptions import CheckpointError
from modalities.parallel.process_group import fail_together, global_rank, on_rank_zero, world_size
from modalities.progress import TrainingProgress

_VISIBLE_WITHIN_S = 10
_LONGEST = TrainingProgress(10**9, 10**15, 10**9, 10**15)
_LONGEST_SAVE_ID = len("-12345678-1000000")


def rehearse_writing(folder: Path, experiment_id: str) -> None:
    """Write, rename and remove a file in the folder, as a save would; all ranks must call it.

    Raises:
        CheckpointError: That fails, a rank does not see the folder, or names would be too long.
    """
    on_rank_zero(lambda: _write_probe(folder, experiment_id))
    fail_together(None if _sees(folder) else _not_shared(folder))


def rehearse_space(folder: Path, app_state: AppState, num_kept: int | None, num_bytes_there: int) -> None:
    """Compare the room on the disk with what the checkpoints will take; all ranks must call it.

    Args:
        folder: Of the checkpoints; exists.
        app_state: That will be saved.
        num_kept: How many checkpoints will be kept at most; one more is in flight.
        num_bytes_there: That this run's checkpoints take already.

    Raises:
        CheckpointError: There is not enough.
    """
    num_bytes = torch.tensor([_estimated_bytes(app_state)], dtype=torch.int64)
    if world_size() > 1:
        dist.all_reduce(num_bytes)
    each = int(num_bytes)
    needed = each * ((num_kept or 0) + 1)

    def compare() -> None:
        free = shutil.disk_usage(folder).free
        if needed - num_bytes_there > free:
            what = f"{num_kept} checkpoints and one in flight" if num_kept else "a checkpoint"
            raise CheckpointError(
                f"{folder} has {_size(free)} free, but {what} of about {_size(each)} each need {_size(needed)}; "
                "make room, lower k of the checkpoint saving, or choose another --experiments_root_path"
            )

    if not is_remote(folder):
        on_rank_zero(compare)


def _write_probe(folder: Path, experiment_id: str) -> None:
    name = paths.checkpoint_name(experiment_id, _LONGEST, paths.RESUME_STATE_ENTITY)
    length = len(durability.TEMPORARY_PREFIX) + len(name.encode()) + _LONGEST_SAVE_ID
    if is_remote(folder):
        probe = folder / f"{durability.TEMPORARY_PREFIX}probe"
        try:
            probe.write_bytes(b"probe")
            probe.unlink()
        except Exception as error:
            # each store has exceptions of its own
            raise CheckpointError(f"cannot write the checkpoint folder {folder}: {error}") from error
        return
    longest = os.pathconf(folder, "PC_NAME_MAX")
    if length > longest:
        raise CheckpointError(
            f"the experiment ID {experiment_id!r} makes checkpoints' names of {length} bytes, and {folder} takes "
            f"{longest}; choose a shorter --experiment_id"
        )
    before, after = (folder / f"{durability.TEMPORARY_PREFIX}eid_{experiment_id}-probe{n}" for n in "12")
    try:
        for probe in (before, after):
            remove_tree(probe)
        write_file(before, b"probe")
        durability.layer.rename(before, after)
        durability.layer.sync_folder(folder)
        durability.layer.remove_file(after)
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint folder {folder}: {error.strerror}") from error


def _sees(folder: Path) -> bool:
    """Whether this rank finds the folder that rank 0 made; some file systems take their time."""
    if is_remote(folder):
        return True
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while not (folder.is_dir() and os.access(folder, os.W_OK)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _not_shared(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"rank {global_rank()} cannot write to {folder}, which rank 0 made: it must be on a file system that all "
        "machines share; choose another --experiments_root_path"
    )


def _estimated_bytes(app_state: AppState) -> int:
    """This rank's share of a checkpoint, without making the optimizer's state before its time."""
    groups = app_state.optimizer.param_groups
    weights = sum(_local_bytes(parameter) for part in app_state.model_parts for parameter in part.parameters())
    if app_state.optimizer.state:
        values = [value for state in app_state.optimizer.state.values() for value in state.values()]
        return weights + sum(_local_bytes(value) for value in values if isinstance(value, Tensor))
    # Adam and its kin have two moments, momentum is one
    moments = [(2 if "betas" in group else 1 if group.get("momentum") else 0, group["params"]) for group in groups]
    return weights + sum(num * _local_bytes(parameter) for num, parameters in moments for parameter in parameters)


def _local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.numel() * local.element_size())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
