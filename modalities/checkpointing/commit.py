"""Making things appear whole or not at all: temporary name, fsync, rename."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)

TEMPORARY_PREFIX = ".tmp-"
TRASH_PREFIX = ".trash-"


def temporary_path(final: Path) -> Path:
    """The name beside ``final`` that it is written under; no reader takes it for a checkpoint."""
    return final.with_name(TEMPORARY_PREFIX + final.name)


@contextlib.contextmanager
def atomic_file(final: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name when the block ends well, durable, replacing what was there; otherwise it is gone."""
    temporary = temporary_path(final)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(final)
        fsync_folder(final.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(final: Path, content: Any) -> None:
    """Replace a JSON file atomically."""
    with atomic_file(final) as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")


def commit_folder(temporary: Path, final: Path) -> None:
    """Give a fully written folder its name; what had that name before is removed afterwards."""
    for file in temporary.rglob("*"):
        _fsync(file)
    fsync_folder(temporary)
    superseded = None
    if final.exists():
        superseded = final.with_name(f"{TRASH_PREFIX}{final.name}-{os.getpid()}")
        final.rename(superseded)
    temporary.rename(final)
    fsync_folder(final.parent)
    if superseded is not None:
        remove(superseded)


def discard(path: Path) -> None:
    """Delete a checkpoint's folder or file: first its name, then its content; a failure is a warning."""
    trash = path.with_name(f"{TRASH_PREFIX}{path.name}-{os.getpid()}")
    try:
        path.rename(trash)
        fsync_folder(path.parent)
    except FileNotFoundError:
        logger.warning("the checkpoint %s is gone already", path)
        return
    except OSError as error:
        logger.warning("could not delete the checkpoint %s: %s", path, error.strerror)
        return
    remove(trash)


def remove(path: Path) -> None:
    """Delete a file or a whole folder; a failure is a warning."""
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("could not remove %s: %s", path, error.strerror)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
