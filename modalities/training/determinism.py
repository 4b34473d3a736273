"""Runs that are the same bit for bit, and digests that tell where two are not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from modalities.checkpointing.app_state import AppState
from modalities.parallel.process_group import global_rank, world_size

_BLOCK_ELEMENTS = 1 << 22
_FACTORS = (-7046029254386353131, -4658895280553007687)
"""Of SplitMix64's finalizer (Steele et al., 2014), as signed numbers."""


@contextmanager
def deterministic(is_wanted: bool) -> Iterator[None]:
    """Within it torch takes deterministic algorithms only, and fails where it has none.

    Two runs on the same number of ranks, hardware and versions are then bitwise equal. Sets
    ``torch.use_deterministic_algorithms``, cuDNN without benchmarking, and cuBLAS's workspace by its environment variable.

    Args:
        is_wanted: Otherwise nothing is set.
    """
    if not is_wanted:
        yield
        return
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    did_benchmark = torch.backends.cudnn.benchmark
    # cuBLAS reads it when the first matrix product comes
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
        torch.backends.cudnn.benchmark = did_benchmark


def weight_digests(app_state: AppState) -> dict[str, str]:
    """A digest of every parameter and buffer by name, the same however it is sharded; all ranks must call it.

    Args:
        app_state: Of the run.

    Returns:
        16 hexadecimal digits for each, in the model's order.
    """
    state = {name: value for name, value in app_state.model_state_dict().items() if isinstance(value, Tensor)}
    sums = [sum_of_bits(local) for local in map(_own_part, state.values())]
    if not sums:
        return {}
    device = next((total.device for total in sums if total.device.type != "cpu"), torch.device("cpu"))
    totals = torch.stack([total.to(device) for total in sums])
    if world_size() > 1:
        dist.all_reduce(totals)
    return dict(zip(state, map(_hexadecimal, totals.tolist()), strict=True))


def tensor_digest(tensor: Tensor) -> str:
    """The digest of one whole tensor."""
    return _hexadecimal(int(sum_of_bits(tensor)))


@torch.no_grad()
def sum_of_bits(tensor: Tensor | None) -> Tensor:
    """Sum of the mixed bits of every element, modulo 2**64; the order of the elements does not count.

    Args:
        tensor: Of any shape and type; None for a part that another rank counts.

    Returns:
        Scalar of int64, on the tensor's device.
    """
    if tensor is None:
        return torch.zeros((), dtype=torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for block in flat.view(integers[flat.dtype.itemsize]).split(_BLOCK_ELEMENTS):
        mixed = block.to(torch.int64) + 1
        for factor in _FACTORS:
            mixed = (mixed ^ (mixed >> 29)) * factor
        total += (mixed ^ (mixed >> 32)).sum()
    return total


def _own_part(value: Any) -> Tensor | None:
    """What this rank counts of a tensor: each element is counted by exactly one rank."""
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return None
        is_first = all(
            place == 0
            for place, placement in zip(coordinate, value.placements, strict=True)
            if placement.is_replicate()
        )
        # other axes of the mesh hold the same
        return value.to_local() if is_first else None
    if hasattr(value, "local_shards"):
        ranks = dist.get_process_group_ranks(value._process_group)
        shards = [shard.tensor.reshape(-1) for shard in value.local_shards()]
        return torch.cat(shards) if 0 in ranks and shards else None
    return value if global_rank() == 0 else None


def _hexadecimal(total: int) -> str:
    return f"{total % 2**64:016x}"
