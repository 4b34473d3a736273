"""A tensor on disk as ``torch.save`` writes it: fixed bytes before its payload and behind it.

Stock ``torch.distributed.checkpoint`` stores each tensor as a zip archive of its own. With zip's check sums off, all of
it but the payload depends on shape and type alone, so it is made once per shape; what is left to write is the payload,
straight from the tensor's memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

import numpy as np
import torch
import torch.utils.serialization

PAGE_BYTES = 4096
LINE_BYTES = 64
LARGE_BYTES = 1 << 16
"""Payloads from this size on start at a page, which spares the disk and the reader a copy."""


@dataclass(frozen=True)
class Frame:
    """The bytes around a payload.

    Args:
        head: Before it.
        tail: Behind it.
        num_payload_bytes: Length of the payload.
    """

    head: bytes
    tail: bytes
    num_payload_bytes: int

    @property
    def num_bytes(self) -> int:
        return len(self.head) + self.num_payload_bytes + len(self.tail)


def alignment_of(num_payload_bytes: int) -> int:
    """What a frame's place in its file, and the payload's place in the frame, are a multiple of."""
    return PAGE_BYTES if num_payload_bytes >= LARGE_BYTES else LINE_BYTES


@functools.cache
def frame_of(shape: tuple[int, ...], dtype: torch.dtype) -> Frame:
    """The frame of a contiguous CPU tensor."""
    tensor = torch.empty(shape, dtype=dtype)  # never touched, so it costs address space only
    sink = _Sink(tensor.data_ptr() if tensor.nbytes else None)
    with plain_archives(alignment_of(tensor.nbytes)):
        torch.save(tensor, cast(IO[bytes], sink))
    return Frame(b"".join(sink.head), b"".join(sink.tail), tensor.nbytes)


def payload_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


class _Sink:
    """What ``torch.save`` writes to: keeps what surrounds the payload, and drops the payload."""

    def __init__(self, payload_pointer: int | None) -> None:
        self.payload_pointer = payload_pointer
        self.head: list[bytes] = []
        self.tail: list[bytes] = []
        self.in_tail = False

    def write(self, data: Any) -> int:
        if not self.in_tail and len(data) and self.payload_pointer == _pointer(data):
            self.in_tail = True
        else:
            (self.tail if self.in_tail else self.head).append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""


def _pointer(data: Any) -> int:
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


@contextmanager
def plain_archives(alignment: int) -> Iterator[None]:
    """``torch.save`` without zip's check sums (torch never checks them), payloads aligned."""
    had_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        settings: Any = torch.utils.serialization.config
        with settings.patch("save.storage_alignment", alignment):
            yield
    finally:
        torch.serialization.set_crc32_options(had_checksums)
