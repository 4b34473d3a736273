"""Making things appear whole or not at all: temporary name, fsync, rename."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from modalities.durability import atomic_file, fsync

logger = logging.getLogger(__name__)

TRASH_PREFIX = ".trash-"


def write_json(final: Path, content: Any) -> None:
    """Replace a JSON file atomically."""
    with atomic_file(final) as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")


def commit_folder(temporary: Path, final: Path) -> None:
    """Give a fully written folder its name; what had that name before is removed afterwards."""
    for file in temporary.rglob("*"):
        fsync(file)
    fsync(temporary)
    superseded = None
    if final.exists():
        superseded = final.with_name(f"{TRASH_PREFIX}{final.name}-{os.getpid()}")
        final.rename(superseded)
    temporary.rename(final)
    fsync(final.parent)
    if superseded is not None:
        remove(superseded)


def discard(path: Path) -> None:
    """Delete a checkpoint's folder or file: first its name, then its content; a failure is a warning."""
    trash = path.with_name(f"{TRASH_PREFIX}{path.name}-{os.getpid()}")
    try:
        path.rename(trash)
        fsync(path.parent)
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
