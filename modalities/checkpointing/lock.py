"""One run at a time writes to a folder of checkpoints."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import platform
import time
from contextlib import suppress
from pathlib import Path

from modalities.checkpointing.storage import is_remote
from modalities.exceptions import CheckpointError

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"

_held: dict[tuple[int, str], int] = {}
"""Descriptors of lock files, by process (a forked one has none of its parent's locks) and name."""


def lock(folder: Path, experiment_id: str) -> None:
    """Take the folder for this process, until it ends, however it ends; data-loading workers do not inherit it.

    Args:
        folder: Of the checkpoints; must exist.
        experiment_id: Runs of other IDs may write to it, too.

    Raises:
        CheckpointError: Another process writes checkpoints of that ID there; the message names it.
    """
    if is_remote(folder):
        return
    path = folder / f"{LOCK_FILE}-{experiment_id}"
    name = _key(path)
    if name in _held and _is_same_file(_held[name], path):
        return
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if not _take(descriptor, folder, experiment_id):
            os.close(descriptor)
            return
        if _is_same_file(descriptor, path):
            break
        os.close(descriptor)  # its owner has removed it since it was opened
    os.ftruncate(descriptor, 0)
    owned_by = {"host": platform.node(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    os.pwrite(descriptor, json.dumps(owned_by).encode(), 0)
    _held[name] = descriptor


def keep_locked(folder: Path, experiment_id: str) -> None:
    """Take the folder anew if it was deleted since this process took it, and the lock with it.

    Raises:
        CheckpointError: Another process has taken it meanwhile.
    """
    if not is_remote(folder) and _key(folder / f"{LOCK_FILE}-{experiment_id}") in _held:
        lock(folder, experiment_id)


def unlock(folder: Path, experiment_id: str) -> None:
    """Give the folder back, if this process has it; an empty folder goes, too."""
    if is_remote(folder):
        return
    path = folder / f"{LOCK_FILE}-{experiment_id}"
    descriptor = _held.pop(_key(path), None)
    if descriptor is None:
        return
    with suppress(OSError):
        path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
    os.close(descriptor)


def _key(path: Path) -> tuple[int, str]:
    return os.getpid(), os.path.realpath(path)


def _take(descriptor: int, folder: Path, experiment_id: str) -> bool:
    """Whether the lock is ours; not where the file system knows no locks."""
    try:
        # a record lock: it goes with the process, and works on network file systems
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            owner = _owner(descriptor)
            os.close(descriptor)
            raise CheckpointError(
                f"another run writes checkpoints of {experiment_id} to {folder}: {owner}; "
                "wait for it, stop it, or choose another --experiment_id"
            ) from error
        logger.warning("%s cannot be locked (%s): make sure that only one run writes there", folder, error.strerror)
        return False
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Whether the lock's file still lies there: who deletes a folder takes the lock with it."""
    try:
        own, there = os.fstat(descriptor), path.stat()
    except OSError:
        return False
    return (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)


def _owner(descriptor: int) -> str:
    try:
        told = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {told['pid']} on {told['host']}, since {told['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that has not told its name"
