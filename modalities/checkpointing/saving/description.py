"""The manifest of what was just written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from modalities.checkpointing.manifest import SAVED_AT_FORMAT, FileRecord, Manifest, Origin, Start, TensorRecord
from modalities.parallel.process_group import world_size
from modalities.progress import TrainingProgress


@dataclass(frozen=True)
class RunContext:
    """What a manifest tells of the run beside its state.

    Args:
        config_hash: xxh3-128 of the canonical config.
        metrics: Of the evaluation at this step, by name.
        start: Which of its starts this is.
        config: What its config means, by path.
    """

    config_hash: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    start: Start = field(default_factory=Start)
    config: Mapping[str, Any] = field(default_factory=dict)


def describe(
    kind: str,
    experiment_id: str,
    progress: TrainingProgress,
    context: RunContext,
    mesh: Mapping[str, int],
    files: Mapping[str, FileRecord],
    tensors: Mapping[str, TensorRecord],
    origin: Origin | None = None,
) -> Manifest:
    """The manifest of a checkpoint, for now."""
    return Manifest(
        kind,
        experiment_id,
        progress,
        world_size(),
        mesh,
        time.strftime(SAVED_AT_FORMAT),
        {"modalities": version("modalities"), "torch": torch.__version__},
        context.config_hash,
        files,
        tensors,
        context.metrics,
        context.start,
        origin,
        context.config,
    )


def tensors_in(metadata: Metadata) -> dict[str, TensorRecord]:
    """Every tensor of a distributed checkpoint."""
    return {
        key: tensor_record(stored.properties.dtype, stored.size)
        for key, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }


def tensor_record(dtype: torch.dtype, shape: Any) -> TensorRecord:
    """A tensor's type and global shape."""
    return TensorRecord(str(dtype).removeprefix("torch."), list(shape))


def mesh_of(model_parts: list[nn.Module]) -> dict[str, int]:
    """Sizes of the axes of the device mesh that the parameters are sharded over; empty if they are not."""
    for part in model_parts:
        for parameter in part.parameters():
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                names = mesh.mesh_dim_names or tuple(f"axis_{index}" for index in range(mesh.ndim))
                return dict(zip(names, mesh.shape, strict=True))
    return {}
