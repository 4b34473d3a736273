"""Checkpoints of any kind as values by key, each read when it is asked for.

All go by the keys of a DCP folder: ``app.model.<name>``, ``app.optimizer.state.<name>.<key>`` and
``app.optimizer.param_groups.<name>.<key>``.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from modalities.checkpointing import paths
from modalities.checkpointing.discovery import Checkpoint, locate_checkpoint
from modalities.checkpointing.reading.load_planner import CheckedLoadPlanner, LoadingOptions
from modalities.checkpointing.reading.safetensors_files import SafetensorsFiles, is_safetensors
from modalities.checkpointing.reading.shard_reading import read_into
from modalities.checkpointing.safe_reading import parse_metadata, read_metadata_bytes, read_state_file
from modalities.exceptions import CheckpointError, DamagedCheckpoint

Kind = Literal["dcp", "fsdp1", "safetensors"]

MODEL_PREFIX = "app.model."
OPTIMIZER_PREFIX = "app.optimizer."
STATE_PREFIX = f"{OPTIMIZER_PREFIX}state."
GROUPS_PREFIX = f"{OPTIMIZER_PREFIX}param_groups."


@dataclass(frozen=True)
class Form:
    """A stored tensor without its content.

    Args:
        shape: Global.
        dtype: As torch names it, without ``torch.``.
        num_bytes: In memory.
    """

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int

    @classmethod
    def of(cls, shape: Any, dtype: torch.dtype) -> Form:
        """The form of tensors of a shape and type."""
        return cls(tuple(shape), str(dtype).removeprefix("torch."), math.prod(shape) * dtype.itemsize)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type as torch has it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


class TensorSource(Protocol):
    """A checkpoint from which single values are read.

    Args:
        path: Folder or file.
        kind: How it is stored.
        forms: Of every key, None for a value that is no tensor.
        tied: By key of a tied tensor, the key of the one whose content it shares; empty where the kind does not tell.
    """

    path: Path
    kind: Kind
    forms: Mapping[str, Form | None]
    tied: Mapping[str, str]

    def read(self, key: str) -> Any:
        """The value of a key.

        Raises:
            DamagedCheckpoint: It cannot be read, or holds more than plain values.
        """


def open_source(location: Path) -> TensorSource:
    """Open a checkpoint for reading single tensors.

    Args:
        location: A DCP folder, a model file of any name, a ``.safetensors`` file or a folder with such files, or what
            :func:`locate_checkpoint` understands.

    Raises:
        CheckpointError: There is no checkpoint.
        DamagedCheckpoint: Its index is damaged.
    """
    if location.is_dir() and (location / ".metadata").is_file():
        return FolderSource(location)
    if is_safetensors(location):
        return SafetensorsSource(location)
    parsed = paths.parse_checkpoint_name(location)
    if location.is_file() and parsed is not None and parsed[1] not in (None, "model"):
        raise CheckpointError(f"{location} is the {parsed[1]} file of a checkpoint; give its model file")
    if location.is_file() and location.name != paths.LAST_CHECKPOINT_INFO:
        return FileSource(location)
    checkpoint = locate_checkpoint(location)
    return FolderSource(checkpoint.path) if checkpoint.is_distributed else FileSource(checkpoint.path)


class FolderSource:
    """A DCP folder.

    Args:
        folder: With ``.metadata`` in it.
    """

    kind: Kind = "dcp"

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.tied: Mapping[str, str] = {}
        self.metadata = parse_metadata(read_metadata_bytes(folder), folder)
        self.forms: Mapping[str, Form | None] = {
            key: Form.of(stored.size, stored.properties.dtype) if isinstance(stored, TensorStorageMetadata) else None
            for key, stored in self.metadata.state_dict_metadata.items()
        }

    def read(self, key: str) -> Any:
        stored = self.metadata.state_dict_metadata[key]
        is_tensor = isinstance(stored, TensorStorageMetadata)
        wanted: dict[str, Any] = {
            key: _room(stored.size, stored.properties.dtype) if is_tensor else None  # type: ignore[union-attr]
        }
        # without the other keys, which need not be looked through with every tensor
        alone = replace(self.metadata, state_dict_metadata={key: stored})
        planner = CheckedLoadPlanner(LoadingOptions(strict=False))
        try:
            read_into(planner, planner.plan(wanted, alone, self.path), alone, self.path)
        except CheckpointError as error:
            raise DamagedCheckpoint(str(error)) from error
        return wanted[key]


class FileSource:
    """A file with a full model, and the optimizer's beside it if it is there.

    Args:
        model_file: As torch saved it; it is mapped into memory, not read.
        optimizer_file: The optimizer's; by default the one that the model file's name tells, if it is there.
    """

    kind: Kind = "fsdp1"

    def __init__(self, model_file: Path, optimizer_file: Path | None = None) -> None:
        self.path = model_file
        model, _ = flatten_state_dict(_read(model_file))
        self._values = {f"{MODEL_PREFIX}{key}": value for key, value in model.items()}
        self.tied: Mapping[str, str] = _sharing(self._values)
        self.parameter_groups: list[list[str]] = []
        parsed = paths.parse_checkpoint_name(model_file)
        if parsed is not None and optimizer_file is None:
            beside = Checkpoint(model_file, parsed[0], parsed[2]).optimizer_path
            optimizer_file = beside if beside.is_file() else None
        if optimizer_file is not None:
            optimizer = _read(optimizer_file)
            self._values |= _flat_optimizer(optimizer, optimizer_file)
            self.parameter_groups = [list(group["params"]) for group in optimizer["param_groups"]]
        self.forms: Mapping[str, Form | None] = {
            key: Form.of(value.shape, value.dtype) if isinstance(value, Tensor) else None
            for key, value in self._values.items()
        }

    def read(self, key: str) -> Any:
        return self._values[key]


class SafetensorsSource:
    """A ``.safetensors`` file, or a folder with ``model.safetensors.index.json`` or ``model.safetensors``.

    Args:
        location: File or folder.
    """

    kind: Kind = "safetensors"

    def __init__(self, location: Path) -> None:
        self.path = location
        self.files = SafetensorsFiles(location)
        forms = {
            f"{MODEL_PREFIX}{name}": Form.of(shape, dtype) for name, (shape, dtype) in self.files.layouts().items()
        }
        self.tied: Mapping[str, str] = {
            f"{MODEL_PREFIX}{alias}": f"{MODEL_PREFIX}{name}" for alias, name in self.files.tied.items()
        }
        self.forms: Mapping[str, Form | None] = forms | {alias: forms[key] for alias, key in self.tied.items()}

    def read(self, key: str) -> Any:
        return self.files.read(self.tied.get(key, key).removeprefix(MODEL_PREFIX))


def _room(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory for a tensor that goes back to the system as soon as it is let go, of which malloc holds back a part."""
    num_bytes = shape.numel() * dtype.itemsize
    if num_bytes < mmap.PAGESIZE:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _sharing(values: Mapping[str, Any]) -> dict[str, str]:
    """By key of a tensor whose elements another one before it has, too, that one's key."""
    first: dict[tuple[Any, ...], str] = {}
    tied = {}
    for key, value in values.items():
        if isinstance(value, Tensor) and value.numel():
            place = (value.data_ptr(), value.dtype, value.shape, value.stride())
            if first.setdefault(place, key) != key:
                tied[key] = first[place]
    return tied


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_state_file(file)
    except CheckpointError as error:
        if paths.parse_checkpoint_name(file) is None:
            raise  # nobody said that it is a checkpoint
        raise DamagedCheckpoint(str(error)) from error


def _flat_optimizer(state: dict[str, Any], file: Path) -> dict[str, Any]:
    """A full optimizer state under the keys that ``flatten_optimizer_state_dict`` gives it."""
    try:
        flat = {
            f"{STATE_PREFIX}{name}.{key}": value
            for name, values in state["state"].items()
            for key, value in values.items()
        }
        for group in state["param_groups"]:
            for name in group["params"]:
                options = {key: value for key, value in group.items() if key != "params"}
                flat |= {f"{GROUPS_PREFIX}{name}.{key}": value for key, value in options.items()}
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{file} holds no optimizer state; is it the model's file?") from None
    return flat
