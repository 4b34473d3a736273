"""Leaving out the reduction of gradients on all but the last micro-batch of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


@contextmanager
def gradient_sync(model_parts: Sequence[nn.Module], enabled: bool) -> Iterator[None]:
    """Within the context, backward passes reduce gradients over the ranks, or only accumulate them.

    Args:
        model_parts: Wrapped by FSDP1, FSDP2 or nothing.
        enabled: Whether gradients are reduced.
    """
    with ExitStack() as stack:
        for part in model_parts:
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(enabled)
            elif isinstance(part, FSDP) and not enabled:
                stack.enter_context(part.no_sync())
        yield


def is_sharded(model: nn.Module) -> bool:
    """Whether the model reduces its gradients over the ranks."""
    return isinstance(model, FSDPModule | FSDP)
