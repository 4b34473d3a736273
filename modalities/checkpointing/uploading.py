"""The second tier: committed checkpoints are copied to another folder or store of objects, beside training."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from modalities.checkpointing.manifest import MANIFEST_FILE, FileRecord, read_manifest
from modalities.checkpointing.saving.checksummed_file import BLOCK_BYTES, ChecksummedFile
from modalities.checkpointing.storage import as_location, destination_of, is_remote, point_at, sweep
from modalities.exceptions import DamagedCheckpoint

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_THREADS = 4
_NUM_TRIES = 3


class Uploader:
    """Copies checkpoints one after another; where they come faster than they can be copied, the newest goes first.

    Args:
        target: Folder or fsspec URL that gets them; what is there stays.
        timeout_s: Seconds that the end of a run waits for what is still being copied.
    """

    def __init__(self, target: Path | str, timeout_s: float) -> None:
        self.target = as_location(target)
        self.timeout_s = timeout_s
        self._current: Path | None = None
        self._next: Path | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, checkpoint: Path) -> None:
        """Copy a committed checkpoint's folder when its turn comes."""
        with self._changed:
            if self._next is not None:
                logger.warning("%s is not uploaded: a newer one came before its turn", self._next.name)
            self._next = checkpoint
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, daemon=True, name="checkpoint-uploader")
                self._thread.start()

    def needs(self, checkpoint: Path) -> bool:
        """Whether a checkpoint must not be deleted yet."""
        with self._changed:
            return checkpoint in (self._current, self._next)

    def close(self) -> None:
        """Wait until all is copied, or it takes too long."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            return
        logger.info("waiting for the upload to %s", self.target)
        thread.join(self.timeout_s)
        with self._changed:
            remaining = [checkpoint.name for checkpoint in (self._current, self._next) if checkpoint is not None]
        if thread.is_alive() and remaining:
            told = ", ".join(remaining)
            logger.error("%s is not in %s: no end of the upload within %g s", told, self.target, self.timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._current, self._next = self._next, None
                if self._current is None:
                    self._thread = None
                    return
            self._try(self._current)
            with self._changed:
                self._current = None

    def _try(self, checkpoint: Path) -> None:
        for remaining in reversed(range(_NUM_TRIES)):
            begun = time.perf_counter()
            try:
                upload(checkpoint, self.target / checkpoint.name)
            except Exception as error:
                # each store has exceptions of its own; training does not depend on them
                logger.warning("uploading %s to %s failed: %s", checkpoint.name, self.target, error)
                time.sleep(1 if remaining else 0)
            else:
                seconds = time.perf_counter() - begun
                logger.info("uploaded %s to %s in %.1f s", checkpoint.name, self.target, seconds)
                return
        logger.error("%s is not in %s: %d tries failed", checkpoint.name, self.target, _NUM_TRIES)


def upload(checkpoint: Path, target: Path) -> None:
    """Copy a checkpoint's folder: the copy is there whole, or not at all.

    Raises:
        DamagedCheckpoint: What was read is not what had been written.
    """
    manifest_file = checkpoint / MANIFEST_FILE
    manifest = read_manifest(manifest_file)
    assert manifest is not None, f"{checkpoint} is committed"
    destination = destination_of(target, f"{secrets.token_hex(4)}-1")
    if not is_remote(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep(target.parent, manifest.experiment_id)

    def copy(item: tuple[str, FileRecord]) -> None:
        name, record = item
        with ChecksummedFile(destination.working / name, destination) as copied, (checkpoint / name).open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                copied.write(block)
            if copied.record() != record:
                raise DamagedCheckpoint(f"{checkpoint / name} is not as it was written")

    try:
        destination.begin()
        _for_each(manifest.files.items(), copy)
        destination.commit(manifest_file.read_bytes())
    except BaseException:
        destination.abandon()
        raise
    point_at(target.parent, {"checkpoint_folder_path": target})


def _for_each(items: Iterable[T], work: Callable[[T], None]) -> None:
    """Do the work in several threads, which do not keep a program from ending when a store is stuck.

    Raises:
        BaseException: The first that the work raised.
    """
    remaining = list(items)
    errors: list[BaseException] = []

    def take() -> None:
        while not errors:
            try:
                item = remaining.pop()
            except IndexError:
                return
            try:
                work(item)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=take, daemon=True, name="checkpoint-upload") for _ in range(_NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
