"""FSDP1: wrapping a model, and full state dicts of it on one rank.

Two facts of torch 2.13 on CPU tensors shape this file: ``offload_to_cpu=True`` makes the full optimizer state silently
wrong (both moments alias one buffer) or crashes, and ``sync_module_states=True`` is refused.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy as TorchShardingStrategy
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.optim import Optimizer

from modalities.exceptions import UserError
from modalities.parallel.parameter_names import blocks_by_class_name, clean_name
from modalities.parallel.precision import fsdp1_mixed_precision
from modalities.parallel.process_group import machine_device, world_size
from modalities.parallel.settings import MixedPrecisionSettings, ShardingStrategy


def shard_model(
    model: nn.Module,
    sync_module_states: bool,
    mixed_precision_settings: MixedPrecisionSettings,
    sharding_strategy: ShardingStrategy | TorchShardingStrategy,
    block_names: list[str],
) -> FSDP:
    """Wrap a model, and each of its blocks, with FSDP1.

    Args:
        model: On a real device; its weights are those of every rank, or of rank 0 with ``sync_module_states``.
        sync_module_states: Give all ranks the weights and buffers of rank 0.
        mixed_precision_settings: Precision of computation, reduction and buffers.
        sharding_strategy: Ours, or torch's of the same name.
        block_names: Class names of the layers that are sharded on their own.

    Raises:
        UserError: A block name matches nothing, or the model is on the meta device.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError("FSDP1 needs a model with weights: set use_meta_device to false, or shard with fsdp2_wrapped")
    blocks = set(blocks_by_class_name(model, block_names))
    device = machine_device()
    if sync_module_states and device.type == "cpu":
        _broadcast_from_rank_zero(model)
    strategy = TorchShardingStrategy[sharding_strategy.name]
    with _without_no_shard_warnings():
        return FSDP(
            model,
            auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=blocks.__contains__),
            mixed_precision=fsdp1_mixed_precision(mixed_precision_settings),
            sharding_strategy=strategy,
            device_mesh=_hybrid_mesh(device) if "HYBRID" in strategy.name else None,
            device_id=device,
            sync_module_states=sync_module_states and device.type != "cpu",
            use_orig_params=True,
        )


def full_model_state_dict(model: FSDP) -> dict[str, Any]:
    """Full (unsharded) parameters and buffers on rank 0, an empty dict elsewhere; all ranks must call it."""
    with _full_state(model):
        return dict(model.state_dict())


def full_optimizer_state_dict(model: FSDP, optimizer: Optimizer) -> dict[str, Any]:
    """Full optimizer state by parameter name on rank 0, an empty dict elsewhere; all ranks must call it."""
    with _full_state(model):
        return dict(FSDP.optim_state_dict(model, optimizer))


def load_full_model_state_dict_(model: nn.Module, state_dict: dict[str, Any], *, strict: bool = True) -> None:
    """Put a full state dict that rank 0 holds into a sharded model, in place.

    Args:
        model: Wrapped by FSDP1 or FSDP2.
        state_dict: The full state on rank 0; empty elsewhere.
        strict: Whether it must be complete; else what it lacks stays as it is.

    Raises:
        RuntimeError: Names or shapes differ.
    """
    set_model_state_dict(model, state_dict, options=replace(_FROM_RANK_ZERO, strict=strict))


def load_full_optimizer_state_dict_(model: nn.Module, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Put a full optimizer state that rank 0 holds into the optimizer of a sharded model, in place.

    Args:
        model: Wrapped by FSDP1 or FSDP2.
        optimizer: Over the model's parameters.
        state_dict: The full state on rank 0, keyed by parameter names; empty elsewhere.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        if isinstance(model, FSDP) and any("_orig_mod." in name for name, _ in model.named_parameters()):
            _load_into_compiled_(model, optimizer, state_dict)
        else:
            set_optimizer_state_dict(model, optimizer, state_dict, options=_FROM_RANK_ZERO)


def _load_into_compiled_(model: FSDP, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """The same for compiled layers inside FSDP1, where torch looks for the state's groups on ranks that have no state."""
    wanted: dict[str, Any] = {}
    if state_dict:
        # FSDP1 itself goes by names that are free of its own wrappers and those of checkpointing, but not of compile's
        named = {id(parameter): name for name, parameter in model.named_parameters()}
        names = {clean_name(name): clean_tensor_name(name) for name in named.values()}
        settings = {name: group for group in state_dict["param_groups"] for name in group["params"]}
        groups = [
            [clean_name(named[id(parameter)]) for parameter in group["params"]] for group in optimizer.param_groups
        ]
        wanted["state"] = {names[name]: state for name, state in state_dict["state"].items()}
        wanted["param_groups"] = [
            {**settings[group[0]], "params": [names[name] for name in group]} for group in groups if group
        ]
    with _full_state(model):
        loaded = FSDP.optim_state_dict_to_load(model, optimizer, wanted)
    optimizer.load_state_dict(loaded)


_FROM_RANK_ZERO = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


@contextmanager
def _full_state(model: FSDP) -> Iterator[None]:
    offload = next(model.parameters()).device.type != "cpu"
    full_state = FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=offload, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=True),
    )
    with full_state, _without_no_shard_warnings():
        yield


@contextmanager
def _without_no_shard_warnings() -> Iterator[None]:
    """torch announces the end of NO_SHARD, and its use for a world of one rank, at every turn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
        yield


def _broadcast_from_rank_zero(model: nn.Module) -> None:
    if world_size() == 1:
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


def _hybrid_mesh(device: torch.device) -> DeviceMesh:
    """Shards within a machine, copies across machines."""
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    if world_size() % per_machine:
        raise UserError(f"{world_size()} ranks cannot be split into machines of {per_machine} ranks each")
    shape = (world_size() // per_machine, per_machine)
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
