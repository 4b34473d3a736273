"""Writing a DCP folder by one process, as the tensors are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.utils._pytree import tree_map_only

from modalities import durability
from modalities.checkpointing.conversion.lazy_tensor import LazyTensor
from modalities.checkpointing.manifest import MANIFEST_FILE, Manifest, Origin
from modalities.checkpointing.safe_reading import METADATA_FILE
from modalities.checkpointing.saving.checksummed_file import Opener, write_file_of
from modalities.checkpointing.saving.description import RunContext, describe, tensors_in
from modalities.checkpointing.saving.planning import flatten, make_plan, rendered
from modalities.checkpointing.saving.shard_files import write_index, write_shards
from modalities.progress import TrainingProgress


def write_dcp(
    folder: Path,
    state: Mapping[str, Any],
    experiment_id: str,
    progress: TrainingProgress,
    *,
    context: RunContext | None = None,
    origin: Origin | None = None,
    more_files: Mapping[str, bytes] | None = None,
    opener: Opener | None = None,
) -> Manifest:
    """Write a checkpoint that ``torch.distributed.checkpoint`` and ``modalities`` read, one tensor in memory at a time.

    Args:
        folder: Is there, and empty.
        state: Nested as it was saved, for runs ``{"app": {"model": …, "optimizer": …, "lr_scheduler": …}}``, with a
            :class:`LazyTensor` for each tensor.
        experiment_id: Told by the manifest.
        progress: Told by the manifest.
        context: Told by the manifest.
        origin: What the checkpoint is converted from.
        more_files: Content of small files beside the data, such as ``resume_state.pt``, by name.
        opener: Carries out the writing.

    Returns:
        The manifest, which was written last.

    Raises:
        CheckpointError: A tensor cannot be read.
        OSError: A file cannot be written.
    """
    opener = opener or durability.layer
    lazy: dict[int, LazyTensor] = {}

    def stand_in(tensor: LazyTensor) -> Tensor:
        made = _without_memory(tensor)
        lazy[id(made)] = tensor
        return made

    planned = tree_map_only(LazyTensor, stand_in, dict(state))
    flat = flatten(planned)
    plan = make_plan(planned, "")
    assert plan.metadata is not None
    elements = (lazy[id(flat[item.index.fqn])].blocks() for item in plan.tensors)
    values = [(index, rendered(flat[index.fqn])) for index in plan.values]
    record, places = write_shards(plan, elements, values, folder, opener)
    files = {plan.file_name: record}
    storage = {**plan.metadata.storage_data, **places}
    meta = StorageMeta(checkpoint_id=folder.name)
    metadata = replace(plan.metadata, storage_data=storage, storage_meta=meta)
    files[METADATA_FILE] = write_index(metadata, folder, opener)
    for name, content in (more_files or {}).items():
        files[name] = write_file_of(folder / name, opener, content)
    manifest = describe(
        "dcp", experiment_id, progress, context or RunContext(), {}, files, tensors_in(metadata), origin
    )
    write_file_of(folder / MANIFEST_FILE, opener, manifest.to_bytes())
    return manifest


def _without_memory(tensor: LazyTensor) -> Tensor:
    """A tensor of that form which has one element in memory."""
    return torch.empty((), dtype=tensor.form.torch_dtype).expand(tensor.form.shape)
