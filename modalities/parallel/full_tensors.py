"""Putting a full tensor into a parameter that may be sharded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@torch.no_grad()
def assign_full_(parameter: Tensor, full_tensor: Tensor) -> None:
    """Copy a full tensor, equal on all ranks, into a plain parameter or into this rank's shard of a DTensor.

    Ranks do not talk to each other. Type and device may differ.

    Args:
        parameter: Plain, or a DTensor on any mesh, split evenly or not.
        full_tensor: Of the parameter's full shape.

    Raises:
        ValueError: The shapes differ.
    """
    if parameter.shape != full_tensor.shape:
        raise ValueError(f"a tensor of shape {list(full_tensor.shape)} for a parameter of {list(parameter.shape)}")
    if not isinstance(parameter, DTensor):
        parameter.copy_(full_tensor)
        return
    shape, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    local = full_tensor
    for dim, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
        # an empty shard's offset may lie beyond the end
        local = local.narrow(dim, min(offset, local.size(dim)), size)
    parameter.to_local().copy_(local)
