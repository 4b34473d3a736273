"""What each rank writes where, in the layout of ``torch.distributed.checkpoint``; worked out once, used for every save."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.tensor import DTensor

from modalities.checkpointing.saving.frames import Frame, alignment_of, frame_of
from modalities.exceptions import CheckpointError
from modalities.parallel.process_group import fail_together, from_rank_zero, global_rank, world_size

_COMPARED_BYTES = 4096
"""Plain values up to this size are compared among the ranks, since only one of them is stored."""


@dataclass(frozen=True)
class TensorItem:
    """A tensor, or the part of one, that this rank writes.

    Args:
        index: Key and place in the whole tensor.
        frame: The bytes around it.
        start: Where its frame starts in this rank's file.
    """

    index: MetadataIndex
    frame: Frame
    start: int


@dataclass(frozen=True)
class RankPlan:
    """What this rank writes.

    Args:
        signature: Of the state that it was made for.
        file_name: This rank's file.
        tensors: In the order of the file.
        layout: Shape and type of each of the tensors.
        values: Keys of what is no tensor; written behind the tensors, since their size varies.
        metadata: Of the whole checkpoint without the values' places; on rank 0 only.
    """

    signature: str
    file_name: str
    tensors: list[TensorItem]
    layout: list[tuple[tuple[int, ...], torch.dtype]]
    values: list[MetadataIndex]
    metadata: Metadata | None

    @property
    def num_tensor_bytes(self) -> int:
        return sum(item.frame.num_payload_bytes for item in self.tensors)


def flatten(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state by dotted key, as ``torch.distributed.checkpoint`` flattens it."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), None, False)
    return planner.state_dict


def signature_of(flat: Mapping[str, Any]) -> str:
    """Tells whether two states of a rank have the same keys, shapes, types and layouts."""
    digest = hashlib.blake2b(digest_size=16)
    for key, value in flat.items():
        digest.update(key.encode())
        if isinstance(value, DTensor):
            digest.update(f"{value.shape}{value.dtype}{value.placements}{value.device_mesh.shape}".encode())
        elif isinstance(value, Tensor):
            digest.update(f"{value.shape}{value.dtype}".encode())
    return digest.hexdigest()


def make_plan(state: Mapping[str, Any], signature: str) -> RankPlan:
    """Divide the state among the ranks; all ranks must call it.

    Args:
        state: Nested, sharded.
        signature: Of this rank's flat state.

    Raises:
        CheckpointError: A value that is stored once differs between ranks.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), None, global_rank() == 0)
    _require_equal_values(planner.state_dict)
    own, metadata = _divide(planner)
    file_name = f"__{global_rank()}_0.distcp"
    tensors, layout, values, position = [], [], [], 0
    for item in own.items:
        if item.type == WriteItemType.BYTE_IO:
            values.append(item.index)
            continue
        assert item.tensor_data is not None
        shape, dtype = tuple(item.tensor_data.chunk.sizes), item.tensor_data.properties.dtype
        frame = frame_of(shape, dtype)
        position += -position % alignment_of(frame.num_payload_bytes)
        tensors.append(TensorItem(item.index, frame, position))
        layout.append((shape, dtype))
        position += frame.num_bytes
    places = {item.index: _StorageInfo(file_name, item.start, item.frame.num_bytes) for item in tensors}
    all_places = _gathered(places)
    if metadata is not None:
        storage = {index: place for of_rank in all_places for index, place in of_rank.items()}
        metadata = replace(metadata, storage_data=storage, version=CURRENT_DCP_VERSION)
    return RankPlan(signature, file_name, tensors, layout, values, metadata)


def rendered(value: Any) -> bytes:
    """A value that is no tensor, as it is stored."""
    sink = io.BytesIO()
    torch.save(value, sink)
    return sink.getvalue()


def _divide(planner: DefaultSavePlanner) -> tuple[SavePlan, Metadata | None]:
    """This rank's share; and on rank 0 the whole's metadata."""
    plans = _gathered(planner.create_local_plan())
    divided: list[SavePlan] = []
    metadata: Metadata | None = None
    problem: str | None = None
    if global_rank() == 0:
        try:
            divided, metadata = planner.create_global_plan(plans)
        except ValueError as error:
            problem = str(error)
    problem = from_rank_zero(problem)
    if problem is not None:
        raise CheckpointError(f"the state cannot be divided among the ranks: {problem}")
    if world_size() == 1:
        return planner.finish_plan(divided[0]), metadata
    own: list[Any] = [None]
    dist.scatter_object_list(own, divided if global_rank() == 0 else None, src=0)
    return planner.finish_plan(own[0]), metadata


def _gathered(own: Any) -> list[Any]:
    """What every rank brings, on rank 0; empty elsewhere."""
    if world_size() == 1:
        return [own]
    gathered: list[Any] = [None] * world_size() if global_rank() == 0 else []
    dist.gather_object(own, gathered if global_rank() == 0 else None, dst=0)
    return gathered


def _require_equal_values(flat: Mapping[str, Any]) -> None:
    if world_size() == 1:
        return
    digests = {}
    for key, value in flat.items():
        is_sharded = isinstance(value, DTensor) or hasattr(value, "local_shards")
        if is_sharded or not isinstance(value, Tensor | int | float | str | bool | list | tuple | dict):
            continue
        if isinstance(value, Tensor) and value.nbytes > _COMPARED_BYTES:
            continue
        plain = value.tolist() if isinstance(value, Tensor) else value
        digests[key] = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    of_rank_zero = from_rank_zero(digests)
    differing = [key for key, digest in digests.items() if of_rank_zero.get(key, digest) != digest]
    problem = None
    if differing:
        problem = CheckpointError(
            f"{', '.join(differing[:5])} differs from rank 0's, but a checkpoint stores it once; "
            "what differs between ranks belongs into AppState.rank_state"
        )
    fail_together(problem)
