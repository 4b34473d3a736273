"""Writing one file that ``torch.load`` reads, as the tensors are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from modalities import durability
from modalities.checkpointing.conversion.lazy_tensor import LazyTensor
from modalities.checkpointing.manifest import FileRecord
from modalities.checkpointing.saving.checksummed_file import Opener
from modalities.checkpointing.saving.full_files import write_full_file
from modalities.parallel.fsdp1_units import TensorSpec


def write_full(path: Path, state: Mapping[str, Any], *, opener: Opener | None = None) -> FileRecord:
    """Write a nested state into one file, one tensor in memory at a time.

    ``torch.load(path, weights_only=True, mmap=True)`` gives the state.

    Args:
        path: Must not exist.
        state: With a :class:`LazyTensor` for each tensor; one and the same at two places is stored once, and shared.
        opener: Carries out the writing.

    Returns:
        Size and checksum of the file.

    Raises:
        CheckpointError: A tensor cannot be read; the file was removed.
        OSError: The file cannot be written, and was removed.
    """
    tensors: Iterable[LazyTensor] = dict.fromkeys(leaf for leaf in tree_leaves(state) if isinstance(leaf, LazyTensor))
    specs = {tensor: _spec(tensor) for tensor in tensors}
    tree: dict[str, Any] = tree_map_only(LazyTensor, specs.__getitem__, dict(state))
    elements = (tensor.blocks() for tensor in specs if tensor.form.num_bytes)
    return write_full_file(tree, list(specs.values()), elements, path, opener or durability.layer)


def _spec(tensor: LazyTensor) -> TensorSpec:
    stride = torch.empty(tensor.form.shape, device="meta").stride()
    return TensorSpec(tensor.form.shape, stride, tensor.form.torch_dtype)
