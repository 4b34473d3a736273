"""Files that appear whole or not at all, and survive a power cut."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

TEMPORARY_PREFIX = ".tmp-"


class FileLayer:
    """The few operations by which checkpoints reach a disk; a test puts a layer that fails in its place."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and those above it; one that is there already is fine, also where ranks race for it."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            # on shared file systems mkdir now and then reports a folder as a clash that is not one
            if not path.is_dir():
                raise

    def create(self, path: Path) -> IO[bytes]:
        """Open a new file for unbuffered writing; an old one of that name is an error."""
        return path.open("xb", buffering=0)

    def write(self, file: IO[bytes], data: Any) -> None:
        """Write all of a buffer."""
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[file.write(remaining) :]

    def write_at(self, file: IO[bytes], data: Any, offset: int) -> None:
        """Write all of a buffer at a place in the file."""
        remaining = memoryview(data)
        while remaining:
            written = os.pwrite(file.fileno(), remaining, offset)
            remaining, offset = remaining[written:], offset + written

    def sync(self, file: IO[bytes]) -> None:
        """Make a file's content durable."""
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        fsync(path)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name, in one step; a file of that name is replaced."""
        source.replace(target)

    def remove_file(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()


layer = FileLayer()
"""What everything here goes through."""


def temporary_path(final: Path, mark: str = "") -> Path:
    """The name beside ``final`` that it is written under; no reader looks for it.

    Args:
        final: The name it will have.
        mark: Tells several tries apart.
    """
    return final.with_name(f"{TEMPORARY_PREFIX}{final.name}{f'-{mark}' if mark else ''}")


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
            layer.sync(file)
        layer.rename(temporary, final)
        layer.sync_folder(final.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and make its content durable; its name is so once its folder is synced."""
    with layer.create(path) as file:
        layer.write(file, content)
        layer.sync(file)


def replace_file(final: Path, content: bytes, mark: str = "") -> None:
    """Write a file that appears whole, durable, in place of what had its name.

    Args:
        final: Its name.
        content: All of it.
        mark: Tells those apart that may replace it at the same time.
    """
    temporary = temporary_path(final, mark)
    layer.remove_file(temporary)
    try:
        write_file(temporary, content)
        layer.rename(temporary, final)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    layer.sync_folder(final.parent)


def remove_tree(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; what vanishes meanwhile is fine."""
    if path.is_dir() and not path.is_symlink():
        with suppress(FileNotFoundError):
            for inner in list(path.iterdir()):
                remove_tree(inner)
            layer.remove_folder(path)
    else:
        layer.remove_file(path)


def fsync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
