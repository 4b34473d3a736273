"""The manifest of a checkpoint: what belongs to it, and the proof that it is whole.

A JSON file, written last and checksummed itself, so that any flipped bit in it is found, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash
from pydantic import TypeAdapter, ValidationError

from modalities.exceptions import CheckpointError, DamagedCheckpoint
from modalities.progress import TrainingProgress

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1
SAVED_AT_FORMAT = "%Y-%m-%dT%H:%M:%S%z"


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint.

    Args:
        size: In bytes.
        xxh3_128: Checksum of its content, hexadecimal.
    """

    size: int
    xxh3_128: str


@dataclass(frozen=True)
class TensorRecord:
    """A tensor of a checkpoint, over all ranks.

    Args:
        dtype: As torch names it, without ``torch.``.
        shape: Global.
    """

    dtype: str
    shape: list[int]


@dataclass(frozen=True)
class Start:
    """A start of a run.

    Args:
        number: 1 for the first, then counted on; 0 where nobody counted.
        step: Where it began.
        parent: Number of the start that wrote the checkpoint it began from; 0 if it began from none.
    """

    number: int = 0
    step: int = 0
    parent: int = 0


@dataclass(frozen=True)
class Origin:
    """What a checkpoint was converted from.

    Args:
        kind: ``dcp``, ``fsdp1`` or ``safetensors``.
        name: Of its folder or file.
        files: Of the source, by name.
        parameter_groups: Names of the parameters in each of the optimizer's groups, which a DCP folder does not tell.
    """

    kind: str
    name: str
    files: Mapping[str, FileRecord]
    parameter_groups: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True)
class Manifest:
    """Content of the file.

    Args:
        kind: ``dcp`` (a folder) or ``fsdp1`` (full files).
        experiment_id: The run that wrote it.
        progress: Counters at the time of saving.
        world_size: Ranks that wrote it.
        mesh: Sizes of the axes of the device mesh, by name; empty without one.
        saved_at: When, in ISO 8601.
        versions: Of modalities and torch.
        config_hash: xxh3-128 of the canonical config, if a run wrote it.
        metrics: Of the evaluation at its step, by name; empty if there was none.
        files: By name.
        tensors: By key.
        start: That wrote it, of all starts of the run.
        origin: What it was converted from; None for one that a run wrote.
        config: What the run's config meant, by path; empty where nobody told.
    """

    kind: str
    experiment_id: str
    progress: TrainingProgress
    world_size: int
    mesh: Mapping[str, int]
    saved_at: str
    versions: Mapping[str, str]
    config_hash: str | None
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]
    metrics: Mapping[str, float] = field(default_factory=dict)
    start: Start = field(default_factory=Start)
    origin: Origin | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def num_bytes(self) -> int:
        """Size of all files together, without the manifest."""
        return sum(record.size for record in self.files.values())

    def to_bytes(self) -> bytes:
        """The file's content."""
        content = {"format_version": self.format_version, **asdict(self)}
        return _render(content, xxhash.xxh3_128_hexdigest(_text(content)))


def parse_manifest(content: bytes, path: Path) -> Manifest:
    """Read a manifest's content.

    Raises:
        DamagedCheckpoint: It is not as it was written.
        CheckpointError: A newer version wrote it.
    """
    try:
        fields = json.loads(content)
        checksum = fields.pop("checksum")
        version = fields["format_version"]
        found = xxhash.xxh3_128_hexdigest(_text(fields))
        intact = found == checksum and content == _render(fields, checksum)
        is_newer = version > FORMAT_VERSION
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: it is not as it was written ({type(error).__name__})") from error
    if not intact:
        raise DamagedCheckpoint(f"{path} is damaged: checksum {checksum} was written, {found} is found")
    if is_newer:
        made_by = fields["versions"].get("modalities") if isinstance(fields.get("versions"), dict) else None
        raise CheckpointError(
            f"{path} has format {version}, made by modalities {made_by}; "
            f"this version reads up to {FORMAT_VERSION}: update modalities"
        )
    try:
        manifest = _adapter().validate_json(json.dumps(fields), strict=True)
        datetime.strptime(manifest.saved_at, SAVED_AT_FORMAT)
    except ValueError as error:
        raise DamagedCheckpoint(f"{path} is no manifest of a checkpoint: {_first_line_of(error)}") from error
    odd = [name for name in manifest.files if not _is_plain(name)]
    if odd:
        raise DamagedCheckpoint(f"{path} names a file outside its folder: {odd[0]!r}")
    return manifest


def read_manifest(path: Path) -> Manifest | None:
    """Read a manifest; None if there is none, as in checkpoints from elsewhere.

    Raises:
        DamagedCheckpoint: It is not as it was written, or cannot be read.
        CheckpointError: A newer version wrote it.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    return parse_manifest(content, path)


@cache
def _adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def _first_line_of(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)


def _is_plain(name: str) -> bool:
    """Whether it is the name of a file in the checkpoint's own folder."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts and "\0" not in name


def _text(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode()


def _render(content: Mapping[str, Any], checksum: str) -> bytes:
    return _text({**content, "checksum": checksum}) + b"\n"
