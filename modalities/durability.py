"""Files that appear whole or not at all, and survive a power cut."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

TEMPORARY_PREFIX = ".tmp-"


def temporary_path(final: Path) -> Path:
    """The name beside ``final`` that it is written under; no reader looks for it."""
    return final.with_name(TEMPORARY_PREFIX + final.name)


@contextmanager
def atomic_file(final: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name when the block ends well, durable, replacing what was there; otherwise it is gone.

    Args:
        final: Its name; the folder must exist.
    """
    temporary = temporary_path(final)
    try:
        with temporary.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(final)
        fsync(final.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def fsync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
