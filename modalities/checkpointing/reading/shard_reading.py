"""Reading tensors of a distributed checkpoint straight into the memory where they belong."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from modalities.checkpointing.reading.load_planner import CheckedLoadPlanner
from modalities.checkpointing.safe_reading import load_plain
from modalities.checkpointing.saving.frames import frame_of, payload_of
from modalities.checkpointing.storage import is_remote
from modalities.exceptions import CheckpointError

SCRATCH_BYTES = 16 << 20
"""Of a thread, for what cannot be read in place."""
_AT_ONCE_BYTES = 2 << 20
"""Of a file: larger reads of what is not in memory yet cost the kernel several times as much."""
_NUM_THREADS = 2

Part = tuple[ReadItem, _StorageInfo]


def read_into(planner: CheckedLoadPlanner, items: Sequence[ReadItem], metadata: Metadata, folder: Path) -> None:
    """Read everything that a plan asks for; the targets change.

    Args:
        planner: Knows the targets.
        items: What is read.
        metadata: Where it lies.
        folder: Of the checkpoint.

    Raises:
        CheckpointError: A file cannot be read, or is not what it must be.
    """
    parts = [(item, metadata.storage_data[item.storage_index]) for item in items]
    by_file: dict[str, list[Part]] = {}
    for part in sorted(parts, key=lambda part: (part[1].relative_path, part[1].offset)):
        by_file.setdefault(part[1].relative_path, []).append(part)
    values: dict[bytes, Any] = {}
    jobs = [(name, half) for name, of_file in by_file.items() for half in _halves(of_file)]

    def read(job: tuple[str, list[Part]]) -> None:
        name, of_file = job
        try:
            with _opened(folder / name) as file:
                for item, place in of_file:
                    _read_item(planner, item, place, metadata, file, values)
        except (OSError, EOFError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}") from error

    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        list(threads.map(read, jobs))


def _halves(parts: list[Part]) -> list[list[Part]]:
    """One file read by two threads, in two stretches of about the same size."""
    total, seen = sum(place.length for _, place in parts), 0
    for index, (_, place) in enumerate(parts):
        seen += place.length
        if 2 * seen >= total and 0 < index + 1 < len(parts):
            return [parts[: index + 1], parts[index + 1 :]]
    return [parts]


def _opened(path: Path) -> Any:
    if is_remote(path):
        return path.open("rb")
    file = path.open("rb", buffering=0)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return file


def _read_item(
    planner: CheckedLoadPlanner,
    item: ReadItem,
    place: _StorageInfo,
    metadata: Metadata,
    file: BinaryIO,
    values: dict[bytes, Any],
) -> None:
    if item.type == LoadItemType.BYTE_IO:
        content = _read_range(file, place.offset, place.length)
        # an optimizer has the same few settings for each of its parameters
        if content not in values:
            values[content] = load_plain(io.BytesIO(content), item.dest_index.fqn)
        value = copy.deepcopy(values[content])
        set_element(planner.original_state_dict, planner.mappings[item.dest_index.fqn], value)
        return
    target = planner.resolve_tensor(item).detach()
    if target.numel() == 0:
        return
    stored = metadata.state_dict_metadata[item.storage_index.fqn]
    assert isinstance(stored, TensorStorageMetadata)
    dtype = stored.properties.dtype
    shape = next(tuple(c.sizes) for c in stored.chunks if c.offsets == item.storage_index.offset)
    frame = frame_of(shape, dtype)
    # frames of another writer, or another torch, may look otherwise
    is_ours = frame.num_bytes == place.length and _read_range(file, place.offset, len(frame.head)) == frame.head
    if is_ours:
        _read_rows(item, target, shape, dtype, file, place.offset + len(frame.head))
    else:
        whole = load_plain(io.BytesIO(_read_range(file, place.offset, place.length)), item.storage_index.fqn)
        _copy(target, _narrowed(whole, item.storage_offsets, item.lengths))
    planner.commit_tensor(item, target)


def _read_rows(
    item: ReadItem, target: Tensor, shape: tuple[int, ...], dtype: torch.dtype, file: BinaryIO, payload_start: int
) -> None:
    """Read what is wanted of a stored chunk: in place where it is one stretch, else through scratch memory."""
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    if not shape:
        shape, target, offsets, lengths = (1,), target.reshape(1), (0,), (1,)
    (first, *inner_offsets), (num_rows, *inner_lengths) = offsets, lengths
    row_bytes = torch.Size(shape[1:]).numel() * dtype.itemsize
    start = payload_start + first * row_bytes
    whole_rows = tuple(inner_lengths) == shape[1:]
    if whole_rows and target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous():
        _fill(file, start, payload_of(target))
        return
    rows_at_once = max(1, min(num_rows, SCRATCH_BYTES // row_bytes))
    scratch = torch.empty((rows_at_once, *shape[1:]), dtype=dtype)
    for row in range(0, num_rows, rows_at_once):
        rows = scratch[: min(rows_at_once, num_rows - row)]
        _fill(file, start + row * row_bytes, payload_of(rows))
        wanted = _narrowed(rows, (0, *inner_offsets), (len(rows), *inner_lengths))
        _copy(target[row : row + len(rows)], wanted)


def _narrowed(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def _copy(target: Tensor, source: Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def _read_range(file: BinaryIO, start: int, length: int) -> bytes:
    content = bytearray(length)
    _fill(file, start, memoryview(content))
    return bytes(content)


def _fill(file: BinaryIO, start: int, target: memoryview) -> None:
    """Read exactly as many bytes as the target has."""
    read = _read_at(file)
    while target:
        num_read = read(target[:_AT_ONCE_BYTES], start)
        if num_read <= 0:
            raise EOFError("the file ends too early")
        target, start = target[num_read:], start + num_read


def _read_at(file: BinaryIO) -> Callable[[memoryview, int], int]:
    if isinstance(file, io.FileIO):
        descriptor = file.fileno()
        return lambda target, start: os.preadv(descriptor, [target], start)

    def seek_and_read(target: memoryview, start: int) -> int:
        file.seek(start)
        content = file.read(len(target))
        target[: len(content)] = content
        return len(content)

    return seek_and_read
