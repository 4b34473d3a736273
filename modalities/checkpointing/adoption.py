"""Mending what lies on disk: manifests for checkpoints that have none, and the pointer to the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from modalities.checkpointing import paths
from modalities.checkpointing.catalogue import Catalogue, Entry, files_of, modified_at, num_writing_ranks, prove
from modalities.checkpointing.discovery import Checkpoint
from modalities.checkpointing.history import history_of
from modalities.checkpointing.manifest import FileRecord, Manifest, TensorRecord
from modalities.checkpointing.storage import point_at, replace_content
from modalities.checkpointing.verification import Finding, check_lengths, checksum_of
from modalities.durability import TEMPORARY_PREFIX
from modalities.exceptions import CheckpointError
from modalities.progress import TrainingProgress

if TYPE_CHECKING:
    from modalities.checkpointing.reading.sources import TensorSource


@dataclass(frozen=True)
class Repair:
    """What became of the pointer.

    Args:
        pointer: The file.
        chosen: The checkpoint that it names now; None if none is good, and the file is as it was.
        skipped: Newer ones, which it does not name, newest first.
    """

    pointer: Path
    chosen: Entry | None
    skipped: list[Entry]


def checkpoint_to_adopt(location: Path) -> Checkpoint:
    """The checkpoint at a path, if it has no manifest.

    Args:
        location: A DCP folder or an FSDP1 model file.

    Raises:
        CheckpointError: It is no checkpoint, has no name of one, or has a manifest already.
    """
    if not location.exists():
        raise CheckpointError(f"no such checkpoint: {location}")
    is_folder = location.is_dir()
    if is_folder and not (location / ".metadata").is_file():
        raise CheckpointError(f"{location} is no DCP checkpoint: it has no .metadata; give the checkpoint's own folder")
    parsed = paths.parse_checkpoint_name(location)
    if parsed is None or (parsed[1] is None) != is_folder or parsed[1] not in (None, "model"):
        rule = paths.CHECKPOINT_FOLDER_STRUCTURE if is_folder else paths.CHECKPOINT_STRUCTURE
        raise CheckpointError(
            f"{location} is not named like a checkpoint, so its experiment and its step are unknown; "
            f"rename it to {rule}" + ("" if is_folder else " with the entity `model`, its optimizer's file likewise")
        )
    checkpoint = Checkpoint(location, parsed[0], parsed[2])
    if not is_folder and not checkpoint.optimizer_path.is_file():
        raise CheckpointError(
            f"{location} is half a checkpoint: there is no {checkpoint.optimizer_path.name} beside it"
        )
    if checkpoint.manifest_path.exists():
        raise CheckpointError(
            f"{checkpoint.manifest_path} exists already; `modalities checkpoint verify` tells whether it holds. "
            "To describe the files as they are now instead, remove it first"
        )
    return checkpoint


def adopt(checkpoint: Checkpoint, on_bytes: Callable[[int], None] | None = None) -> Manifest:
    """Read every tensor once, then write the manifest that a checkpoint lacks.

    Args:
        checkpoint: As :func:`checkpoint_to_adopt` gave it.
        on_bytes: Told how many bytes more were read for the checksums.

    Raises:
        CheckpointError: Something cannot be read, or is more than tensors and plain values.
    """
    # here and below: torch takes seconds to import, and mending the pointer has no need of it
    from modalities.checkpointing.reading.sources import open_source

    saved_at = modified_at(checkpoint)
    progress = _progress(checkpoint)
    source = open_source(checkpoint.path)
    for key in source.forms:
        source.read(key)
    manifest = Manifest(
        kind=source.kind,
        experiment_id=checkpoint.experiment_id,
        progress=progress,
        world_size=num_writing_ranks(checkpoint),
        mesh={},
        saved_at=saved_at,
        versions={"adopted_by": version("modalities")},
        config_hash=None,
        files=_records(checkpoint, on_bytes),
        tensors=_tensors(source),
    )
    replace_content(checkpoint.manifest_path, manifest.to_bytes())
    return manifest


def check_without_manifest(checkpoint: Checkpoint) -> list[Finding]:
    """What can be told of a checkpoint without a manifest: that its index is readable, and its files long enough."""
    from modalities.checkpointing.reading.sources import FolderSource, open_source
    from modalities.checkpointing.safe_reading import file_lengths

    try:
        source = open_source(checkpoint.path)
    except CheckpointError as error:
        return [Finding(".metadata" if checkpoint.is_distributed else checkpoint.path.name, str(error))]
    if not isinstance(source, FolderSource):
        return []
    return check_lengths(checkpoint.path, file_lengths(source.metadata))


def repair(catalogue: Catalogue, on_bytes: Callable[[int], None] | None = None) -> Repair:
    """Point ``last_checkpoint_info.json`` at the newest checkpoint whose files are all as they were written.

    Args:
        catalogue: Of the folder.
        on_bytes: Told how many bytes more were read.
    """
    skipped: list[Entry] = []
    for entry in _newest_first(catalogue.entries):
        found = entry if entry.is_bad else prove(entry, on_bytes)
        if found.state == "good":
            return Repair(point_at(catalogue.folder, _named(found)), found, skipped)
        skipped.append(found)
    return Repair(catalogue.folder / paths.LAST_CHECKPOINT_INFO, None, skipped)


def _newest_first(entries: Sequence[Entry]) -> list[Entry]:
    """Without those that their runs have gone back behind."""
    current: set[Checkpoint] = set()
    for experiment_id in {entry.checkpoint.experiment_id for entry in entries}:
        own = [entry for entry in entries if entry.checkpoint.experiment_id == experiment_id]
        current.update(history_of({entry.checkpoint: entry.start for entry in own}).current)
    return [entry for entry in reversed(entries) if entry.checkpoint in current]


def _named(entry: Entry) -> dict[str, Path]:
    checkpoint = entry.checkpoint
    if entry.kind == "dcp":
        return {"checkpoint_folder_path": checkpoint.path}
    return {"model_checkpoint_path": checkpoint.path, "optimizer_checkpoint_path": checkpoint.optimizer_path}


def _progress(checkpoint: Checkpoint) -> TrainingProgress:
    """What the name tells, and the samples, where the resume state knows them."""
    from modalities.checkpointing.resume_state import read_resume_state

    resume_state = read_resume_state(checkpoint.resume_state_path)
    if resume_state is None:
        return checkpoint.progress
    if replace(resume_state.progress, num_seen_samples=0) != checkpoint.progress:
        saved_as = paths.checkpoint_name(checkpoint.experiment_id, resume_state.progress)
        raise CheckpointError(
            f"{checkpoint.path} is not named by its own progress: {checkpoint.resume_state_path.name} in it "
            f"was saved as {saved_as}; rename one or remove the other"
        )
    return resume_state.progress


def _records(checkpoint: Checkpoint, on_bytes: Callable[[int], None] | None) -> dict[str, FileRecord]:
    if checkpoint.is_distributed:
        found = [path for path in sorted(checkpoint.path.rglob("*")) if path.is_file()]
    else:
        found = files_of(checkpoint, "fsdp1")
    return {
        path.relative_to(checkpoint.folder).as_posix(): FileRecord(path.stat().st_size, checksum_of(path, on_bytes))
        for path in found
        if not path.name.startswith(TEMPORARY_PREFIX)
    }


def _tensors(source: TensorSource) -> dict[str, TensorRecord]:
    """By the keys that a run writes: those of a DCP folder, or the model's own ones of a full file."""
    from modalities.checkpointing.reading.sources import MODEL_PREFIX

    records = {
        key: TensorRecord(form.dtype, list(form.shape)) for key, form in source.forms.items() if form is not None
    }
    if source.kind == "dcp":
        return records
    return {key.removeprefix(MODEL_PREFIX): rec for key, rec in records.items() if key.startswith(MODEL_PREFIX)}
