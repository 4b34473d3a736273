"""Copies of tensors that training goes on to change, in memory that is allocated once and used for every save."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modalities.checkpointing.saving.frames import PAGE_BYTES

_MADV_HUGEPAGE = 14
_SHARE_OF_FREE_MEMORY = 0.8


class Snapshot:
    """One arena that holds a copy of every tensor of a rank.

    Args:
        layout: Shape and type of each tensor.
        device: Where the tensors are; the arena is on the CPU, pinned for an accelerator.
    """

    def __init__(self, layout: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        starts, end = [], 0
        for shape, dtype in layout:
            starts.append(end)
            end += _num_bytes(shape, dtype)
            end += -end % PAGE_BYTES
        self.num_bytes = end
        self._arena = _touched(end, device)
        self.tensors = [
            self._arena[start : start + _num_bytes(shape, dtype)].view(dtype).view(shape)
            for start, (shape, dtype) in zip(starts, layout, strict=True)
        ]
        self._copied: Any = None

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors; on an accelerator beside what it computes, until :meth:`wait`.

        Args:
            tensors: In the order of the layout.
        """
        pairs = [(copy, tensor.detach()) for copy, tensor in zip(self.tensors, tensors, strict=True) if tensor.numel()]
        accelerated = [(copy, tensor) for copy, tensor in pairs if tensor.device.type != "cpu"]
        pairs = [(copy, tensor) for copy, tensor in pairs if tensor.device.type == "cpu"]
        if accelerated:
            self._copied = _copy_beside(accelerated)
        # one fused copy per type; mixed types would be copied one by one
        pairs.sort(key=lambda pair: str(pair[1].dtype))
        for _, same in groupby(pairs, key=lambda pair: pair[1].dtype):
            copies, originals = zip(*same, strict=True)
            torch._foreach_copy_(list(copies), list(originals))

    def wait(self) -> None:
        """Wait until all is copied; before that the tensors must not change."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None


def fits_in_memory(num_bytes: int) -> bool:
    """Whether this machine has room for a snapshot of that size on each of its ranks."""
    free = free_memory_bytes()
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return free is None or num_bytes * ranks_here <= _SHARE_OF_FREE_MEMORY * free


def free_memory_bytes() -> int | None:
    """Memory that this machine, or the container in it, still has; None where it does not tell."""
    told = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        told += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            told.append(int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no limit of a container's
    return min(told) if told else None


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _touched(num_bytes: int, device: torch.device) -> Tensor:
    """Memory whose pages are all there: the first touch of a page costs more than copying it."""
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    memory = mmap.mmap(-1, max(num_bytes, PAGE_BYTES))
    arena = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
    if sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(arena.data_ptr()), ctypes.c_size_t(len(memory)), _MADV_HUGEPAGE)
    return arena.zero_()


def _copy_beside(pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
    """Start copying to pinned memory on a stream of its own; gives the event that tells the end."""
    device = pairs[0][1].device
    accelerator: Any = torch.get_device_module(device)
    stream = accelerator.Stream(device)
    stream.wait_stream(accelerator.current_stream(device))
    with accelerator.stream(stream):
        for copy, tensor in pairs:
            copy.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
        event = accelerator.Event()
        event.record(stream)
    return event
