"""Bringing a built run to where a checkpoint left it, and the builders that do so from a config."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.discovery import Checkpoint
from modalities.checkpointing.fsdp.fsdp_checkpoint_loading import DCPCheckpointLoading, FSDP1CheckpointLoading
from modalities.checkpointing.interfaces import DistributedCheckpointLoadingIF, FSDP1CheckpointLoadingIF
from modalities.checkpointing.key_report import compare_keys, compare_tensors
from modalities.checkpointing.reading.load_planner import LoadingOptions
from modalities.checkpointing.reading.loading import verify_together
from modalities.checkpointing.resume_state import ResumeState, read_resume_state
from modalities.checkpointing.safe_reading import read_state_file
from modalities.checkpointing.torch_checkpoint_loading import TorchCheckpointLoading
from modalities.checkpointing.verification import Level
from modalities.exceptions import CheckpointError
from modalities.optim.schedulers import is_told_by_steps
from modalities.parallel.fsdp1 import load_full_model_state_dict_, load_full_optimizer_state_dict_
from modalities.parallel.fsdp1_units import full_model_state
from modalities.parallel.parameter_names import clean_name
from modalities.parallel.process_group import global_rank, on_rank_zero
from modalities.parallel.settings import MixedPrecisionSettings, ShardingStrategy

logger = logging.getLogger(__name__)


def restore_(app_state: AppState, checkpoint: Checkpoint, checkpoint_loading: object = None) -> ResumeState | None:
    """Load a checkpoint of either kind into a built app state, in place; all ranks must call it.

    Args:
        app_state: As built.
        checkpoint: What to load.
        checkpoint_loading: Loads a distributed checkpoint, instead of the standard way. Full files are loaded into the
            model as it is wrapped already.

    Returns:
        Counters and random states, or None if the checkpoint is from elsewhere and has none. The random states are not
        set yet, since what happens until training goes on would use them up.

    Raises:
        DamagedCheckpoint: The checkpoint is not as it was written; the app state is as it was.
        CheckpointError: The checkpoint is absent, or of another model.
    """
    # first of all: after the load nobody could go back to an earlier checkpoint because of it
    resume_state = on_rank_zero(lambda: read_resume_state(checkpoint.resume_state_path))
    if on_rank_zero(lambda: checkpoint.is_distributed):
        loading = checkpoint_loading if isinstance(checkpoint_loading, DistributedCheckpointLoadingIF) else None
        (loading or DCPCheckpointLoading(global_rank())).load_checkpoint_(app_state, checkpoint.path)
        return resume_state
    level = checkpoint_loading.verify if isinstance(checkpoint_loading, FSDP1CheckpointLoading) else "full"
    verify_together(checkpoint, level)
    _restore_full_files_(app_state, checkpoint)
    if app_state.lr_scheduler is not None:
        _restore_scheduler_(app_state.lr_scheduler, checkpoint, resume_state)
    return resume_state


def _restore_scheduler_(scheduler: LRScheduler, checkpoint: Checkpoint, resume_state: ResumeState | None) -> None:
    if resume_state is not None and resume_state.lr_scheduler is not None:
        scheduler.load_state_dict(resume_state.lr_scheduler)
        return
    if not is_told_by_steps(scheduler):
        raise CheckpointError(
            f"{checkpoint.path} stores no state of the learning-rate scheduler, and that of a {type(scheduler).__name__} "
            "is more than a number of steps; use a scheduler of modalities"
        )
    num_steps = checkpoint.progress.num_seen_steps
    if global_rank() == 0:
        logger.warning(
            "%s stores no state of the learning-rate scheduler: it goes on from step %d, as the name tells",
            checkpoint.path.name,
            num_steps,
        )
    scheduler.load_state_dict({"last_epoch": num_steps})


def _restore_full_files_(app_state: AppState, checkpoint: Checkpoint) -> None:
    model = app_state.model

    def read(path: Path) -> dict[str, object]:
        return read_state_file(path) if global_rank() == 0 else {}

    own = full_model_state(model).tree if isinstance(model, FullyShardedDataParallel) else model.state_dict()
    on_rank_zero(lambda: _check_files(checkpoint, {clean_name(name): tensor for name, tensor in own.items()}))
    app_state.mark_loaded()
    try:
        load_full_model_state_dict_(model, read(checkpoint.path))
        load_full_optimizer_state_dict_(model, app_state.optimizer, read(checkpoint.optimizer_path))
    except (RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(f"the checkpoint {checkpoint.path} does not fit the model: {error}") from error


def _check_files(checkpoint: Checkpoint, own: Mapping[str, Any]) -> None:
    """Check that the files are of this model, before anything of it changes."""
    model_state = read_state_file(checkpoint.path)
    compare_tensors(own, model_state, checkpoint.path)
    optimizer_state = read_state_file(checkpoint.optimizer_path)
    if not {"state", "param_groups"} <= optimizer_state.keys():
        raise CheckpointError(f"{checkpoint.optimizer_path} holds no optimizer state")
    stateful = optimizer_state["state"]
    compare_keys(stateful, [name for name in model_state if name in stateful], checkpoint.path)


def make_dcp_loading(
    global_rank: int, verify: Level, strict: bool, include: list[str] | None, exclude: list[str], allow_cast: bool
) -> DCPCheckpointLoading:
    """Builder of ``checkpoint_loading: dcp``."""
    loading = DCPCheckpointLoading(global_rank)
    loading.options = LoadingOptions(verify, strict, include, exclude, allow_cast)
    return loading


def make_fsdp1_loading(
    global_rank: int,
    block_names: list[str],
    mixed_precision_settings: MixedPrecisionSettings,
    sharding_strategy: ShardingStrategy,
    verify: Level,
) -> FSDP1CheckpointLoading:
    """Builder of ``checkpoint_loading: fsdp1``."""
    loading = FSDP1CheckpointLoading(global_rank, block_names, mixed_precision_settings, sharding_strategy)
    loading.verify = verify
    return loading


def load_app_state(
    raw_app_state: AppState,
    checkpoint_dir_path: Path,
    checkpoint_loading: DistributedCheckpointLoadingIF | None = None,
) -> AppState:
    """Builder of ``app_state: dcp``."""
    loading = checkpoint_loading or DCPCheckpointLoading(global_rank())
    return loading.load_checkpoint_(raw_app_state, checkpoint_dir_path)


def load_fsdp1_model(
    checkpoint_loading: FSDP1CheckpointLoadingIF | TorchCheckpointLoading, checkpoint_path: Path, model: nn.Module
) -> nn.Module:
    """Builder of ``model: fsdp1_checkpointed``."""
    return checkpoint_loading.load_model_checkpoint(model, checkpoint_path)


def load_fsdp1_optimizer(
    checkpoint_loading: FSDP1CheckpointLoadingIF,
    checkpoint_path: Path,
    wrapped_model: FullyShardedDataParallel,
    optimizer: Optimizer,
) -> Optimizer:
    """Builder of ``optimizer: fsdp1_checkpointed``."""
    checkpoint_loading.load_optimizer_checkpoint_(optimizer, wrapped_model, checkpoint_path)
    return optimizer
