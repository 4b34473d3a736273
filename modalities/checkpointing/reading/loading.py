"""Loading a distributed checkpoint: what fits, what is whole, and only then a byte of data."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modalities.checkpointing.discovery import Checkpoint
from modalities.checkpointing.manifest import FileRecord, Manifest
from modalities.checkpointing.reading.load_planner import CheckedLoadPlanner, LoadingOptions
from modalities.checkpointing.reading.shard_reading import read_into
from modalities.checkpointing.safe_reading import METADATA_FILE, file_lengths, parse_metadata, read_metadata_bytes
from modalities.checkpointing.verification import (
    Finding,
    Level,
    check_content,
    check_lengths,
    check_structure,
    share_of,
)
from modalities.exceptions import CheckpointError, DamagedCheckpoint
from modalities.parallel.process_group import all_gathered, fail_together, global_rank, on_rank_zero, world_size

logger = logging.getLogger(__name__)

_SHOWN = 20


class HalfLoaded(CheckpointError):
    """Loading broke off after the first tensor had changed: what was loaded into must not be used."""


def load_(state: dict[str, Any], folder: Path, options: LoadingOptions) -> None:
    """Read a checkpoint folder into a sharded state, in place; all ranks must call it.

    Args:
        state: Nested. Its tensors are written to; other values are replaced.
        folder: The checkpoint's.
        options: What is loaded, and how thoroughly the checkpoint is checked.

    Raises:
        CheckpointError: The folder is absent, or of another model; the state is as it was.
        DamagedCheckpoint: The checkpoint is not as it was written; the state is as it was.
        HalfLoaded: Reading failed though the checkpoint was found whole; the state is lost.
    """
    with _undisturbed():
        _load(state, folder, options)


def _load(state: dict[str, Any], folder: Path, options: LoadingOptions) -> None:
    checkpoint = Checkpoint.of_folder(folder)
    content = on_rank_zero(lambda: _metadata_of(checkpoint, options.verify))
    metadata = parse_metadata(content, folder)
    planner = CheckedLoadPlanner(options)
    items: Any = None
    problem: Exception | None = None
    try:
        items = planner.plan(state, metadata, folder)
    except CheckpointError as error:
        problem = error
    except Exception as error:
        # without a manifest a damaged index is found out only when it makes no sense
        problem = DamagedCheckpoint(f"{folder / METADATA_FILE} is damaged: {type(error).__name__}: {error}")
        problem.__cause__ = error
    fail_together(problem)
    verify_together(checkpoint, options.verify, needed=file_lengths(metadata))
    problem = None
    try:
        read_into(planner, items, metadata, folder)
    except CheckpointError as error:
        problem = HalfLoaded(f"{error}; the model is half loaded and of no use: start again")
    fail_together(problem)
    if planner.skipped and global_rank() == 0:
        some = ", ".join(planner.skipped[:_SHOWN])
        more = f" and {len(planner.skipped) - _SHOWN} more" if len(planner.skipped) > _SHOWN else ""
        logger.warning("not loaded from %s, kept as built: %s%s", folder.name, some, more)
        logger.debug("all that is kept as built: %s", ", ".join(planner.skipped))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without the garbage collector, which would look through all of torch because of the many small objects of a plan."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def verify_together(checkpoint: Checkpoint, level: Level, needed: Mapping[str, int] | None = None) -> Manifest | None:
    """Prove that a checkpoint is as it was written, each byte read by one rank; all ranks must call it.

    Args:
        checkpoint: What is checked.
        level: How thoroughly.
        needed: Bytes that files must have at least, by name, for a checkpoint without a manifest.

    Returns:
        The manifest; None if the checkpoint has none, which is a warning.

    Raises:
        DamagedCheckpoint: It is not; every bad file is named.
    """

    def look() -> tuple[Manifest | None, list[Finding], bool]:
        manifest, findings = check_structure(checkpoint)
        if manifest is None:
            findings = check_lengths(checkpoint.folder, needed or {})
        return manifest, findings, checkpoint.is_distributed

    manifest, findings, is_folder = on_rank_zero(look)
    if manifest is None:
        if global_rank() == 0 and level != "off" and not findings:
            logger.warning(
                "%s has no manifest, so nobody can tell whether it is as it was written; "
                "`modalities checkpoint adopt %s` reads it whole and writes one",
                checkpoint.path.name,
                checkpoint.path,
            )
    elif level == "full" and not findings:
        folder = checkpoint.path if is_folder else checkpoint.path.parent
        own_share: dict[str, FileRecord] = share_of(manifest.files, global_rank(), world_size())
        for of_rank in all_gathered(check_content(folder, own_share)):
            findings += of_rank
    if level != "off":
        _refuse(checkpoint, findings)
    return manifest


def _refuse(checkpoint: Checkpoint, findings: list[Finding]) -> None:
    if findings:
        told = "; ".join(map(str, findings))
        raise DamagedCheckpoint(f"the checkpoint {checkpoint.path} is damaged: {told}")


def _metadata_of(checkpoint: Checkpoint, level: Level) -> bytes:
    """The index, proven before anybody looks into it: one that is damaged seems to be of another model."""
    folder = checkpoint.path
    if not folder.exists():
        raise CheckpointError(f"no such checkpoint: {folder}")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; a DCP checkpoint is a folder")
    if level != "off":
        manifest, findings = check_structure(checkpoint)
        if manifest is not None and level == "full" and not findings:
            index = {name: record for name, record in manifest.files.items() if name == METADATA_FILE}
            findings = check_content(folder, index)
        _refuse(checkpoint, findings)
    return read_metadata_bytes(folder)
