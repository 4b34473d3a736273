"""Proving that a checkpoint is as it was written."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import xxhash

from modalities.checkpointing import paths
from modalities.checkpointing.discovery import Checkpoint, checkpoints_in
from modalities.checkpointing.history import history_of, start_of
from modalities.checkpointing.manifest import SAVED_AT_FORMAT, FileRecord, Manifest, Start, read_manifest
from modalities.checkpointing.retention import SavedCheckpoint
from modalities.checkpointing.storage import is_remote
from modalities.exceptions import CheckpointError, DamagedCheckpoint

logger = logging.getLogger(__name__)

Level = Literal["full", "sizes", "off"]

_BLOCK_BYTES = 1 << 20
"""Read and hashed at a time: what was read is still in the cache when it is hashed."""
_NUM_THREADS = 2


@dataclass(frozen=True)
class Finding:
    """What is wrong with a file of a checkpoint.

    Args:
        file: Its name.
        problem: In words.
    """

    file: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


def check_structure(checkpoint: Checkpoint) -> tuple[Manifest | None, list[Finding]]:
    """Read the manifest, and compare the sizes of the files that it names; no data is read.

    Returns:
        The manifest, None if the checkpoint has none; and what is wrong.

    Raises:
        DamagedCheckpoint: The manifest itself is damaged.
        CheckpointError: A newer version wrote it.
    """
    manifest = read_manifest(checkpoint.manifest_path)
    return manifest, [] if manifest is None else check_sizes(checkpoint.folder, manifest.files)


def check_sizes(folder: Path, files: Mapping[str, FileRecord]) -> list[Finding]:
    """Compare the sizes of files.

    Args:
        folder: That holds them.
        files: What they must be, by name.
    """
    findings = []
    for name, record in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            findings.append(Finding(name, "is missing"))
            continue
        except OSError as error:
            findings.append(Finding(name, f"cannot be read: {error.strerror}"))
            continue
        if size != record.size:
            findings.append(Finding(name, f"has {size} bytes, {record.size} were written"))
    return findings


def check_lengths(folder: Path, needed: Mapping[str, int]) -> list[Finding]:
    """Check that files have what an index says of them, where there is no manifest.

    Args:
        folder: That holds them.
        needed: Bytes that they must have at least, by name.
    """
    findings = []
    for name, num_bytes in sorted(needed.items()):
        file = folder / name
        if not file.is_file():
            findings.append(Finding(name, "is missing"))
        elif (size := file.stat().st_size) < num_bytes:
            findings.append(Finding(name, f"has {size} bytes, .metadata names {num_bytes}"))
    return findings


def saved_in(folder: Path, experiment_id: str, *, is_distributed: bool) -> list[SavedCheckpoint]:
    """An experiment's whole checkpoints of one kind, as retention sees them, oldest first.

    Left out are damaged ones, and those that the run has gone back behind: they neither count as kept nor are deleted.
    """
    looked_into: dict[Checkpoint, tuple[Manifest | None, list[Finding]]] = {}
    starts: dict[Checkpoint, Start | None] = {}
    for checkpoint in checkpoints_in(folder, experiment_id):
        if checkpoint.is_distributed != is_distributed:
            continue
        try:
            looked_into[checkpoint] = check_structure(checkpoint)
        except CheckpointError as error:
            logger.warning("%s", error)
            continue
        starts[checkpoint] = start_of(looked_into[checkpoint][0])
    saved = []
    for checkpoint in reversed(history_of(starts).current):
        manifest, findings = looked_into[checkpoint]
        if manifest is None:
            saved.append(SavedCheckpoint(checkpoint.progress))
        elif not findings:
            saved_at = datetime.strptime(manifest.saved_at, SAVED_AT_FORMAT)
            saved.append(SavedCheckpoint(checkpoint.progress, saved_at, manifest.metrics))
    return saved


def require_whole_file(path: Path, level: Level = "full") -> None:
    """Check a file of full state against the manifest beside it; without one, against the checksums in it.

    Args:
        path: The file.
        level: How thoroughly.

    Raises:
        DamagedCheckpoint: It is not as it was written.
    """
    if not path.is_file() or level == "off":
        return
    record = _record_of(path)
    if record is None:
        findings = check_archive(path) if level == "full" else []
        if findings:
            raise DamagedCheckpoint(f"the checkpoint file {path} is damaged: {findings[0].problem}")
        return
    findings = check_sizes(path.parent, {path.name: record})
    if level == "full" and not findings:
        findings = check_content(path.parent, {path.name: record})
    if findings:
        raise DamagedCheckpoint(f"the checkpoint file {path} is damaged: {findings[0].problem}")


def _record_of(path: Path) -> FileRecord | None:
    parsed = paths.parse_checkpoint_name(path)
    if parsed is None:
        return None
    experiment_id, _, progress = parsed
    manifest = read_manifest(path.with_name(paths.checkpoint_name(experiment_id, progress, paths.MANIFEST_ENTITY)))
    return manifest.files.get(path.name) if manifest is not None else None


def check_archive(path: Path) -> list[Finding]:
    """Compare the checksums that torch keeps in a file of its own, where nothing else proves it; all of it is read.

    Args:
        path: Of ``torch.save``; of any other file nothing is found, nor in one that was written without checksums, as
            streamed ones are.
    """
    if not zipfile.is_zipfile(path):
        return []
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.CRC and not _is_intact(archive, entry):
                    return [Finding(path.name, f"`{entry.filename}` in it is not as its checksum says")]
    except (zipfile.BadZipFile, OSError) as error:
        return [Finding(path.name, f"cannot be read: {error}")]
    return []


def _is_intact(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(entry) as content:
            while content.read(_BLOCK_BYTES):
                pass
    except zipfile.BadZipFile:
        return False
    return True


def check_content(
    folder: Path, files: Mapping[str, FileRecord], on_bytes: Callable[[int], None] | None = None
) -> list[Finding]:
    """Read files whole and compare their checksums.

    Args:
        folder: That holds them.
        files: What they must be, by name.
        on_bytes: Told how many bytes more were read; from several threads.
    """

    def check(item: tuple[str, FileRecord]) -> Finding | None:
        name, record = item
        try:
            found = checksum_of(folder / name, on_bytes)
        except OSError as error:
            return Finding(name, f"cannot be read: {error.strerror or error}")
        if found == record.xxh3_128:
            return None
        return Finding(name, f"checksum {record.xxh3_128} was written, {found} is found")

    if len(files) < 2:
        findings = list(map(check, files.items()))
    else:
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            findings = list(threads.map(check, files.items()))
    return [finding for finding in findings if finding is not None]


def checksum_of(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """xxh3-128 of a file's content, hexadecimal."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    # unbuffered: a buffer of Python's would be one copy more
    options: dict[str, Any] = {} if is_remote(path) else {"buffering": 0}
    with path.open("rb", **options) as file:
        if not is_remote(path) and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while num_read := file.readinto(buffer):
            digest.update(buffer[:num_read])
            if on_bytes is not None:
                on_bytes(num_read)
    return digest.hexdigest()


def share_of(files: Mapping[str, FileRecord], rank: int, world_size: int) -> dict[str, FileRecord]:
    """The files that a rank checks: together the ranks check each file once, in shares of about the same size.

    In the world that wrote them each rank gets its own file, which its machine may still have in memory.
    """
    shares: Sequence[dict[str, FileRecord]] = [{} for _ in range(world_size)]
    loads = [0] * world_size
    for name, record in sorted(files.items(), key=lambda item: (-item[1].size, item[0])):
        own = name.removeprefix("__").partition("_")[0]
        preferred = int(own) if own.isdigit() and int(own) < world_size else None
        lightest = min(range(world_size), key=loads.__getitem__)
        chosen = preferred if preferred is not None and not shares[preferred] else lightest
        shares[chosen][name] = record
        loads[chosen] += record.size
    return shares[rank]
