"""Proof of both sides of a conversion: the source is as it was written, and so is what was made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modalities.checkpointing import paths
from modalities.checkpointing.catalogue import files_of
from modalities.checkpointing.comparison import is_same_value
from modalities.checkpointing.conversion.lazy_tensor import digest_of
from modalities.checkpointing.discovery import Checkpoint
from modalities.checkpointing.manifest import FileRecord, Manifest
from modalities.checkpointing.reading.sources import FileSource, FolderSource, SafetensorsSource, TensorSource
from modalities.checkpointing.safe_reading import file_lengths
from modalities.checkpointing.verification import (
    check_archive,
    check_content,
    check_lengths,
    check_structure,
    checksum_of,
)
from modalities.exceptions import CheckpointError, DamagedCheckpoint

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""A bar: what is done, and how many bytes it takes; gives what is told of bytes that are done."""


@dataclass(frozen=True)
class ProvenSource:
    """A checkpoint to convert.

    Args:
        source: Its values.
        checkpoint: What it is named, for a DCP folder or a file that is named like a checkpoint's.
        manifest: What it is proven by; None if it has none.
        files: Its files as they are, by name.
    """

    source: TensorSource
    checkpoint: Checkpoint | None
    manifest: Manifest | None
    files: Mapping[str, FileRecord]


def prove_source(source: TensorSource, progress: Progress) -> ProvenSource:
    """Read all files of a source, and compare them with its manifest; without one what they tell of themselves is checked.

    Raises:
        DamagedCheckpoint: It is not as it was written; every bad file is named.
    """
    checkpoint = _named(source)
    manifest, findings = check_structure(checkpoint) if checkpoint is not None else (None, [])
    if isinstance(source, FolderSource) and manifest is None:
        findings = check_lengths(source.path, file_lengths(source.metadata))
    if isinstance(source, FileSource) and manifest is None:
        findings = [finding for path in _files(source, checkpoint) for finding in check_archive(path)]
    if manifest is not None and not findings:
        with progress("verifying", manifest.num_bytes) as on_bytes:
            findings = check_content(_folder(source), manifest.files, on_bytes)
    if findings:
        raise DamagedCheckpoint(f"the checkpoint {source.path} is damaged: {'; '.join(map(str, findings))}")
    if manifest is not None:
        return ProvenSource(source, checkpoint, manifest, manifest.files)
    found = _files(source, checkpoint)
    with progress("reading", sum(path.stat().st_size for path in found)) as on_bytes:
        files = {
            path.relative_to(_folder(source)).as_posix(): FileRecord(path.stat().st_size, checksum_of(path, on_bytes))
            for path in found
        }
    return ProvenSource(source, checkpoint, None, files)


def prove_output(
    output: TensorSource, tensors: Mapping[str, str | None], values: Mapping[str, Any], on_bytes: Callable[[int], None]
) -> None:
    """Read back what was written, one tensor in memory at a time.

    Args:
        output: As readers see it.
        tensors: xxh3-128 of the elements that each must have, by key; None for one without elements.
        values: What is no tensor, by key.
        on_bytes: Told how many bytes more were read.

    Raises:
        CheckpointError: It is not what was to be written.
    """
    wrong = [key for key in (*tensors, *values) if key not in output.forms]
    wrong += [key for key in output.forms if key not in tensors and key not in values]
    for key, form in output.forms.items():
        if key in wrong:
            continue
        if form is None:
            is_good = key in values and is_same_value(output.read(key), values[key])
        else:
            is_good = not form.num_bytes or digest_of(output.read(key)) == tensors.get(key)
            on_bytes(form.num_bytes)
        if not is_good:
            wrong.append(key)
    if wrong:
        raise CheckpointError(
            f"{output.path} was read back and is not what was written, in {len(wrong)} keys, such as `{wrong[0]}`; "
            "the disk or the memory may be failing: nothing was kept"
        )


def prove_files(records: Mapping[Path, FileRecord], on_bytes: Callable[[int], None]) -> None:
    """Read files back and compare their checksums with what was taken when they were written.

    Raises:
        CheckpointError: They differ.
    """
    for path, record in records.items():
        if findings := check_content(path.parent, {path.name: record}, on_bytes):
            raise CheckpointError(f"{path} was read back and is not what was written: {findings[0]}; nothing was kept")


def _named(source: TensorSource) -> Checkpoint | None:
    if isinstance(source, FolderSource):
        return Checkpoint.of_folder(source.path)
    parsed = paths.parse_checkpoint_name(source.path)
    if source.kind != "fsdp1" or parsed is None or parsed[1] != "model":
        return None
    return Checkpoint(source.path, parsed[0], parsed[2])


def _folder(source: TensorSource) -> Path:
    return source.path if source.path.is_dir() else source.path.parent


def _files(source: TensorSource, checkpoint: Checkpoint | None) -> list[Path]:
    if isinstance(source, SafetensorsSource):
        return source.files.files
    if isinstance(source, FolderSource):
        return sorted(path for path in source.path.rglob("*") if path.is_file())
    return [source.path] if checkpoint is None else files_of(checkpoint, "fsdp1")
