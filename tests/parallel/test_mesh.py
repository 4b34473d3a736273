"""The device mesh, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from modalities.exceptions import UserError
from modalities.parallel.mesh import make_device_mesh, parallel_degree
from modalities.parallel.settings import ParallelismDegrees
from modalities.testing.ranks import run_on_ranks


def _make(world_size: int, **degrees: Any) -> Any:
    fields: dict[str, Any] = {
        "device_type": None,
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": -1,
        "tensor_parallel_degree": 1,
        "pipeline_parallel_degree": 1,
        "context_parallel_degree": 1,
        "enable_loss_parallel": False,
    }
    return make_device_mesh(world_size=world_size, **{**fields, **degrees})


def _shape(world_size: int, degrees: dict[str, Any]) -> tuple[tuple[str, ...] | None, tuple[int, ...], int]:
    mesh = _make(world_size, **degrees)
    both = parallel_degree(mesh, [ParallelismDegrees.DP_SHARD, ParallelismDegrees.DP_REPLICATE])
    return mesh.mesh_dim_names, tuple(mesh.shape), both


@pytest.mark.parametrize(
    ("degrees", "names", "shape"),
    [
        ({}, ("dp_shard",), (2,)),
        ({"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}, ("dp_replicate", "dp_shard"), (2, 1)),
        ({"data_parallel_replicate_degree": -1, "data_parallel_shard_degree": 2}, ("dp_shard",), (2,)),
    ],
)
def test_axes(degrees: dict[str, Any], names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    assert run_on_ranks(_shape, 2, 2, degrees) == [(names, shape, 2)] * 2


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"data_parallel_shard_degree": 3}, "data_parallel_shard_degree 3 = 3 ranks, but the job has 4"),
        ({"data_parallel_replicate_degree": 3}, "= 3 ranks, but the job has 4"),
        ({"data_parallel_replicate_degree": -1}, "only one degree can be -1"),
        ({"data_parallel_shard_degree": 0}, "must be at least 1"),
        ({"tensor_parallel_degree": 2}, "tensor_parallel_degree is 2"),
        ({"pipeline_parallel_degree": 2}, "pipeline_parallel_degree is 2"),
        ({"enable_loss_parallel": True}, "enable_loss_parallel"),
    ],
)
def test_what_does_not_fit_is_refused(degrees: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _make(4, **degrees)


def _wrong_world() -> str:
    with pytest.raises(UserError) as refusal:
        _make(3)
    return str(refusal.value)


def test_a_world_size_that_is_not_running_is_refused() -> None:
    for message in run_on_ranks(_wrong_world, 2):
        assert "device_mesh.world_size is 3, but 2 processes are running" in message
