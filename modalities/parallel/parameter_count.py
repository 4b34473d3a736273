"""Counting parameters of a model that may be sharded."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def num_parameters(model: nn.Module) -> int:
    """Parameters of the whole model, over all ranks; a tied one counts once."""
    if not isinstance(model, FSDP):
        return sum(parameter.numel() for parameter in model.parameters())
    total = 0
    for module in FSDP.fsdp_modules(model):
        handle = module._handle
        if handle is None:
            continue
        flat = handle.flat_param
        # a rank sees its shard only; the flat parameter remembers the sizes, padding between parameters included
        sizes = zip(flat._numels_with_padding, flat._is_padding_mask, strict=True)
        total += sum(size for size, is_padding in sizes if not is_padding)
    return total
