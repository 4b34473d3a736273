"""What lies in a folder of checkpoints: whole ones, damaged ones, and what killed runs left behind."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from modalities.checkpointing import paths
from modalities.checkpointing.discovery import Checkpoint, path_in_info
from modalities.checkpointing.history import start_of
from modalities.checkpointing.manifest import SAVED_AT_FORMAT, Manifest, Start
from modalities.checkpointing.storage import SUPERSEDED_PREFIX, TRASH_PREFIX, is_remote
from modalities.checkpointing.verification import Finding, check_content, check_structure
from modalities.durability import TEMPORARY_PREFIX
from modalities.exceptions import CheckpointError, DamagedCheckpoint
from modalities.progress import TrainingProgress

State = Literal["good", "damaged", "unverified", "unreadable"]
"""``unverified``: there is no manifest; ``unreadable``: the manifest is a newer version's."""
Kind = Literal["dcp", "fsdp1"]

_DATA_FILE = re.compile(r"__(?P<rank>\d+)_\d+\.distcp")
_LEFTOVERS = {
    TEMPORARY_PREFIX: "being written, or left by a killed save",
    TRASH_PREFIX: "left by a killed deletion",
    SUPERSEDED_PREFIX: "put aside while it was replaced; the next run puts it back or removes it",
}


@dataclass(frozen=True)
class Entry:
    """A checkpoint on the disk, and what is known of its health.

    Args:
        checkpoint: Where it is.
        kind: A ``dcp`` folder, or the full files of ``fsdp1``.
        state: As far as it was looked into.
        findings: Why it is not good.
        manifest: None if it has none, or none that can be read.
        num_bytes: Of all its files, as they are now.
        saved_at: When, in ISO 8601: by its manifest, else by the disk.
        world_size: Ranks that wrote it.
        is_last: Whether ``last_checkpoint_info.json`` points at it.
    """

    checkpoint: Checkpoint
    kind: Kind
    state: State
    findings: tuple[Finding, ...]
    manifest: Manifest | None
    num_bytes: int
    saved_at: str
    world_size: int
    is_last: bool = False

    @property
    def progress(self) -> TrainingProgress:
        """Counters at the time of saving; without a manifest, samples are 0."""
        return self.checkpoint.progress if self.manifest is None else self.manifest.progress

    @property
    def start(self) -> Start | None:
        """Which start of the run wrote it; None if its manifest cannot be read."""
        return None if self.manifest is None and self.is_bad else start_of(self.manifest)

    @property
    def is_bad(self) -> bool:
        """Whether it is known to be of no use here; one without a manifest is not."""
        return self.state in ("damaged", "unreadable")

    @property
    def verdict(self) -> str:
        """The state in words, with the reasons."""
        if self.state == "good":
            return "good"
        if self.state == "unverified":
            return "unverified, no manifest"
        return f"{self.state}: {'; '.join(map(str, self.findings))}"


@dataclass(frozen=True)
class Leftover:
    """What a run that was killed left behind.

    Args:
        path: File or folder.
        num_bytes: Of all that is in it.
        what: In words.
    """

    path: Path
    num_bytes: int
    what: str


@dataclass(frozen=True)
class Pointer:
    """What ``last_checkpoint_info.json`` says.

    Args:
        target: The checkpoint it names; None if it names none.
        problem: What is wrong with it, in words.
    """

    target: Path | None
    problem: str | None


@dataclass(frozen=True)
class Catalogue:
    """Everything in a folder that has to do with checkpoints.

    Args:
        folder: That was looked through.
        entries: Fewest steps first.
        leftovers: By name.
        pointer: None if there is no ``last_checkpoint_info.json``.
        is_of_one: Whether one checkpoint was asked for, and the others in the folder are not in here.
    """

    folder: Path
    entries: Sequence[Entry]
    leftovers: Sequence[Leftover]
    pointer: Pointer | None
    is_of_one: bool = False

    @property
    def num_bytes(self) -> int:
        """Disk use of checkpoints and leftovers together."""
        return sum(entry.num_bytes for entry in self.entries) + sum(left.num_bytes for left in self.leftovers)


def open_catalogue(location: Path) -> Catalogue:
    """Look through what a user points at.

    Args:
        location: A run's folder, a folder of checkpoints, a pointer file, or one checkpoint, which is then alone in it.

    Raises:
        CheckpointError: Nothing of the kind is there.
    """
    if not location.exists():
        raise CheckpointError(f"no such checkpoint or run folder: {location}")
    if location.name == paths.LAST_CHECKPOINT_INFO:
        return catalogue_of(location.parent)
    entry = entry_at(location)
    if entry is not None:
        return Catalogue(location.parent, [entry], [], _read_pointer(location.parent), is_of_one=True)
    for folder in (location, location / "checkpoints"):
        if folder.is_dir():
            found = catalogue_of(folder)
            if found.entries or found.leftovers:
                return found
    raise CheckpointError(
        f"no checkpoint in {location}; the name of one is {paths.CHECKPOINT_FOLDER_STRUCTURE}, "
        f"or for fsdp1 {paths.CHECKPOINT_STRUCTURE}"
    )


def entry_at(location: Path) -> Entry | None:
    """The checkpoint at a path: a DCP folder, or any file of an FSDP1 checkpoint; None if it is not named like one."""
    parsed = paths.parse_checkpoint_name(location)
    if parsed is None:
        return None
    experiment_id, entity, progress = parsed
    pointer = _read_pointer(location.parent)
    if entity is None:
        is_folder = location.is_dir()
        return _look_into(Checkpoint(location, experiment_id, progress), "dcp", pointer) if is_folder else None
    checkpoint = Checkpoint(
        location.with_name(paths.checkpoint_name(experiment_id, progress, "model")), experiment_id, progress
    )
    is_there = checkpoint.path.is_file() or checkpoint.manifest_path.is_file()
    return _look_into(checkpoint, "fsdp1", pointer) if is_there else None


def catalogue_of(folder: Path) -> Catalogue:
    """Look through a folder of checkpoints: names, manifests and sizes; no data is read."""
    pointer = _read_pointer(folder)
    checkpoints: dict[Path, tuple[Checkpoint, Kind]] = {}
    parts: dict[Path, list[Path]] = {}
    leftovers = []
    for path in sorted(folder.iterdir()):
        for prefix, what in _LEFTOVERS.items():
            if path.name.startswith(f"{prefix}eid_"):
                leftovers.append(Leftover(path, num_bytes_of([path]), what))
        parsed = paths.parse_checkpoint_name(path)
        if parsed is None:
            continue
        experiment_id, entity, progress = parsed
        if entity is None and path.is_dir():
            checkpoints[path] = Checkpoint(path, experiment_id, progress), "dcp"
        elif entity is not None and path.is_file():
            model = folder / paths.checkpoint_name(experiment_id, progress, "model")
            parts.setdefault(model, []).append(path)
            if entity in ("model", paths.MANIFEST_ENTITY):
                checkpoints[model] = Checkpoint(model, experiment_id, progress), "fsdp1"
    for model in parts.keys() - checkpoints.keys():
        leftovers += [Leftover(path, num_bytes_of([path]), "its checkpoint has no model file") for path in parts[model]]
    ordered = sorted(checkpoints.values(), key=lambda item: (item[0].progress, item[0].path))
    entries = [_look_into(checkpoint, kind, pointer) for checkpoint, kind in ordered]
    return Catalogue(folder, entries, sorted(leftovers, key=lambda leftover: leftover.path.name), pointer)


def prove(entry: Entry, on_bytes: Callable[[int], None] | None = None) -> Entry:
    """Read all files that a manifest names and compare their checksums.

    Args:
        entry: Without a manifest it stays as it is.
        on_bytes: Told how many bytes more were read; from several threads.
    """
    if entry.manifest is None:
        return entry
    problems = {finding.file: finding.problem for finding in entry.findings}
    readable = {name: record for name, record in entry.manifest.files.items() if _can_be_hashed(problems.get(name))}
    for finding in check_content(entry.checkpoint.folder, readable, on_bytes):
        told = problems.get(finding.file)
        problems[finding.file] = f"{told}; {finding.problem}" if told else finding.problem
    findings = tuple(Finding(file, problem) for file, problem in problems.items())
    return replace(entry, findings=findings, state="damaged" if findings else "good")


def files_of(checkpoint: Checkpoint, kind: Kind) -> list[Path]:
    """The folder of a checkpoint, or those of its files that are there, in the order in which they are deleted."""
    if kind == "dcp":
        return [checkpoint.path]
    names = [
        paths.checkpoint_name(checkpoint.experiment_id, checkpoint.progress, entity)
        for entity in reversed(paths.ENTITIES_OF_FSDP1)
    ]
    return [path for name in names if (path := checkpoint.path.with_name(name)).is_file()]


def num_bytes_of(found: Sequence[Path]) -> int:
    """Size of files, and of folders with all that is in them."""
    return sum(_sizes(found))


def num_writing_ranks(checkpoint: Checkpoint) -> int:
    """Ranks that wrote data, as the names of the files tell; 1 if they do not."""
    if not checkpoint.is_distributed:
        return 1
    named = (_DATA_FILE.fullmatch(path.name) for path in checkpoint.path.iterdir())
    return max(1, len({match["rank"] for match in named if match is not None}))


def modified_at(checkpoint: Checkpoint) -> str:
    """When its folder or model file last changed, in ISO 8601 as manifests write it."""
    changed_s = checkpoint.path.stat().st_mtime if checkpoint.path.exists() else time.time()
    return time.strftime(SAVED_AT_FORMAT, time.localtime(changed_s))


def _look_into(checkpoint: Checkpoint, kind: Kind, pointer: Pointer | None) -> Entry:
    manifest: Manifest | None = None
    findings: list[Finding] = []
    state: State = "good"
    try:
        manifest, findings = check_structure(checkpoint)
    except DamagedCheckpoint as error:
        findings = [Finding(checkpoint.manifest_path.name, str(error))]
    except CheckpointError as error:
        state, findings = "unreadable", [Finding(checkpoint.manifest_path.name, str(error))]
    else:
        if manifest is None:
            state = "unverified"
        if manifest is None and kind == "dcp" and not (checkpoint.path / ".metadata").is_file():
            state, findings = "damaged", [Finding(".metadata", "is missing, and so is the manifest")]
    if state == "good" and findings:
        state = "damaged"
    points_here = pointer is not None and pointer.target is not None and _is_same(pointer.target, checkpoint.path)
    return Entry(
        checkpoint,
        kind,
        state,
        tuple(findings),
        manifest,
        num_bytes_of(files_of(checkpoint, kind)),
        modified_at(checkpoint) if manifest is None else manifest.saved_at,
        num_writing_ranks(checkpoint) if manifest is None else manifest.world_size,
        points_here,
    )


def _can_be_hashed(problem: str | None) -> bool:
    return problem is None or problem.startswith("has ")


def _read_pointer(folder: Path) -> Pointer | None:
    path = folder / paths.LAST_CHECKPOINT_INFO
    try:
        target = path_in_info(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return Pointer(None, f"{path} cannot be read: {error.strerror}")
    except CheckpointError as error:
        return Pointer(None, str(error))
    return Pointer(target, None if target.exists() else f"{path} points at {target}, which is not there")


def _is_same(one: Path, other: Path) -> bool:
    if is_remote(one) or is_remote(other):
        return str(one) == str(other)
    return os.path.realpath(one) == os.path.realpath(other)


def _sizes(found: Sequence[Path]) -> Iterator[int]:
    for path in found:
        # a run may delete meanwhile
        with suppress(FileNotFoundError):
            if path.is_dir():
                yield from _sizes(list(path.iterdir()))
            else:
                yield path.stat().st_size
