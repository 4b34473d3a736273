"""Writing a file once, with its checksum taken on the way out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

import xxhash
from torch import Tensor

from modalities.checkpointing.manifest import FileRecord
from modalities.checkpointing.saving.frames import payload_of

BLOCK_BYTES = 4 << 20
"""Hashed and written at a time: small enough to be in the cache for both."""


class Opener(Protocol):
    """Where files go: a folder on disk, or a store of objects."""

    def create(self, path: Path) -> IO[bytes]: ...
    def write(self, file: IO[bytes], data: bytes | memoryview) -> None: ...
    def sync(self, file: IO[bytes]) -> None: ...


class ChecksummedFile:
    """A new file that is written from front to back; a context that makes it durable at its end.

    Args:
        path: Must not exist.
        opener: Carries out the writing.
    """

    def __init__(self, path: Path, opener: Opener) -> None:
        self.path, self.opener = path, opener
        self._file = opener.create(path)
        self._hash = xxhash.xxh3_128()
        self._pending: list[bytes] = []
        self._num_pending = 0
        self.num_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; small ones are gathered."""
        self.num_bytes += len(data)
        if len(data) < BLOCK_BYTES // 64:
            self._pending.append(bytes(data))
            self._num_pending += len(data)
            if self._num_pending >= BLOCK_BYTES:
                self._flush()
            return
        self._flush()
        view = memoryview(data)
        for start in range(0, len(view), BLOCK_BYTES):
            self._put(view[start : start + BLOCK_BYTES])

    def pad_to(self, alignment: int) -> None:
        """Append zeros up to the next multiple."""
        if padding := -self.num_bytes % alignment:
            self.write(bytes(padding))

    def record(self) -> FileRecord:
        """Size and checksum of what was written."""
        self._flush()
        return FileRecord(self.num_bytes, self._hash.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._flush()
                self.opener.sync(self._file)
        finally:
            self._file.close()

    def _flush(self) -> None:
        if self._pending:
            pending, self._pending, self._num_pending = b"".join(self._pending), [], 0
            self._put(pending)

    def _put(self, block: bytes | memoryview) -> None:
        self._hash.update(block)
        self.opener.write(self._file, block)


def write_file_of(path: Path, opener: Opener, content: bytes) -> FileRecord:
    """Write a small file at once."""
    with ChecksummedFile(path, opener) as file:
        file.write(content)
        return file.record()


def write_blocks(file: ChecksummedFile, blocks: Iterable[Tensor], num_bytes: int) -> None:
    """Append the elements of a tensor.

    Args:
        file: Is appended to.
        blocks: Contiguous, on the CPU, one after the other.
        num_bytes: Of all together.
    """
    end = file.num_bytes + num_bytes
    for block in blocks:
        file.write(payload_of(block))
    assert file.num_bytes == end, f"{num_bytes} bytes were to be written, {num_bytes + file.num_bytes - end} were"
