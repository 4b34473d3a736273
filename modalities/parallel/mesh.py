"""The device mesh: which ranks share what."""

from __future__ import annotations

import logging
import math

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from modalities.exceptions import UserError
from modalities.parallel.process_group import global_rank, machine_device, world_size
from modalities.parallel.settings import ParallelismDegrees

logger = logging.getLogger(__name__)

DATA_PARALLEL_AXES = (ParallelismDegrees.DP_REPLICATE.value, ParallelismDegrees.DP_SHARD.value)


def make_device_mesh(
    device_type: str | None,
    data_parallel_replicate_degree: int,
    data_parallel_shard_degree: int,
    tensor_parallel_degree: int,
    pipeline_parallel_degree: int,
    context_parallel_degree: int,
    enable_loss_parallel: bool | None,
    world_size: int,
) -> DeviceMesh:
    """A mesh with the axes pp, dp_replicate, dp_shard, cp, tp; an axis of one rank is left out, except dp_shard.

    Raises:
        UserError: The degrees do not multiply to the number of ranks, or one of them is not supported.
    """
    degrees = {
        "pipeline_parallel_degree": pipeline_parallel_degree,
        "data_parallel_replicate_degree": data_parallel_replicate_degree,
        "data_parallel_shard_degree": data_parallel_shard_degree,
        "context_parallel_degree": context_parallel_degree,
        "tensor_parallel_degree": tensor_parallel_degree,
    }
    for name in ("pipeline_parallel_degree", "context_parallel_degree", "tensor_parallel_degree"):
        if degrees[name] > 1:
            raise UserError(
                f"{name} is {degrees[name]}, but this version shards along the data-parallel axes only: set it to 1"
            )
    if enable_loss_parallel:
        raise UserError("enable_loss_parallel needs a tensor-parallel axis, which this version lacks: set it to false")
    _check_world(world_size)
    sizes = _fill_up(degrees, world_size)
    axes = dict(zip(("pp", "dp_replicate", "dp_shard", "cp", "tp"), sizes, strict=True))
    present = {axis: size for axis, size in axes.items() if size > 1 or axis == "dp_shard"}
    return init_device_mesh(_usable(device_type), tuple(present.values()), mesh_dim_names=tuple(present))


def parallel_degree(device_mesh: DeviceMesh, parallelism_methods: list[ParallelismDegrees]) -> int:
    """Number of ranks along the given axes together; an axis that the mesh lacks counts as 1."""
    names = device_mesh.mesh_dim_names or ()
    return math.prod(device_mesh[m.value].size() for m in parallelism_methods if m.value in names)


def data_parallel_mesh(device_mesh: DeviceMesh) -> DeviceMesh:
    """The part of a mesh that data parallelism uses: (dp_shard) or (dp_replicate, dp_shard)."""
    names = tuple(axis for axis in DATA_PARALLEL_AXES if axis in (device_mesh.mesh_dim_names or ()))
    return device_mesh[names]


def _check_world(configured: int) -> None:
    if dist.is_initialized() and configured != world_size():
        raise UserError(
            f"device_mesh.world_size is {configured}, but {world_size()} processes are running; "
            "write world_size: ${cuda_env:WORLD_SIZE}"
        )


def _fill_up(degrees: dict[str, int], num_ranks: int) -> list[int]:
    open_degrees = [name for name, degree in degrees.items() if degree == -1]
    for name, degree in degrees.items():
        if degree == 0 or degree < -1:
            raise UserError(f"{name} is {degree}; it must be at least 1, or -1 to fill up the world")
    if len(open_degrees) > 1:
        raise UserError(f"only one degree can be -1, but {' and '.join(open_degrees)} are")
    given = math.prod(degree for degree in degrees.values() if degree != -1)
    product = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "degrees of 1"
    if num_ranks % given or (not open_degrees and given != num_ranks):
        raise UserError(
            f"{product} = {given} ranks, but the job has {num_ranks}; change a degree, set one to -1, "
            f"or start {given} processes"
        )
    return [num_ranks // given if degree == -1 else degree for degree in degrees.values()]


def _usable(device_type: str | None) -> str:
    available = machine_device().type
    if device_type is None or device_type == available or device_type == "cpu":
        return device_type or available
    if global_rank() == 0:
        logger.warning("no %s device on this machine: the mesh uses %s", device_type, available)
    return available
