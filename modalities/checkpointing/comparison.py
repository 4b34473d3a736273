"""Looking into checkpoints of either kind one tensor at a time: shapes, norms, differences.

Both kinds go by the keys of a DCP folder: ``app.model.<name>`` and ``app.optimizer.state.<name>.<key>``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from modalities.checkpointing import paths
from modalities.checkpointing.discovery import Checkpoint, locate_checkpoint
from modalities.checkpointing.reading.load_planner import CheckedLoadPlanner, LoadingOptions
from modalities.checkpointing.reading.shard_reading import read_into
from modalities.checkpointing.safe_reading import parse_metadata, read_metadata_bytes, read_state_file
from modalities.config.suggestions import did_you_mean
from modalities.exceptions import CheckpointError, DamagedCheckpoint

Status = Literal["equal", "only in A", "only in B", "shape", "dtype", "values"]

MODEL_PREFIX = "app.model."
OPTIMIZER_PREFIX = "app.optimizer."

_BLOCK_ELEMENTS = 1 << 22
"""Computed with at a time in double precision, whatever the size of the tensor."""


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


class TensorSource(Protocol):
    """A checkpoint from which single values are read.

    Args:
        path: Folder or model file.
        forms: Of every key, None for a value that is no tensor.
    """

    path: Path
    kind: Literal["dcp", "fsdp1"]
    forms: Mapping[str, Form | None]

    def read(self, key: str) -> Any:
        """The value of a key.

        Raises:
            DamagedCheckpoint: It cannot be read, or holds more than plain values.
        """


@dataclass(frozen=True)
class Difference:
    """How a key compares between two checkpoints, A and B.

    Args:
        key: As a DCP folder names it.
        status: ``equal`` is bit for bit.
        a: Form in A, None if it is not there or no tensor.
        b: Form in B, likewise.
        max_abs: The largest absolute difference of tensors that differ in values.
        relative: L2 norm of the difference over the L2 norm of A.
        note: The two values where they are no tensors.
    """

    key: str
    status: Status
    a: Form | None = None
    b: Form | None = None
    max_abs: float | None = None
    relative: float | None = None
    note: str = ""


def open_source(location: Path) -> TensorSource:
    """Open a checkpoint for reading single tensors.

    Args:
        location: A DCP folder or a model file of any name, or what :func:`locate_checkpoint` understands.

    Raises:
        CheckpointError: There is no checkpoint.
        DamagedCheckpoint: Its index is damaged.
    """
    if location.is_dir() and (location / ".metadata").is_file():
        return FolderSource(location)
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

    kind: Literal["dcp", "fsdp1"] = "dcp"

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.metadata = parse_metadata(read_metadata_bytes(folder), folder)
        self.forms: Mapping[str, Form | None] = {
            key: _form(stored.size, stored.properties.dtype) if isinstance(stored, TensorStorageMetadata) else None
            for key, stored in self.metadata.state_dict_metadata.items()
        }

    def read(self, key: str) -> Any:
        stored = self.metadata.state_dict_metadata[key]
        is_tensor = isinstance(stored, TensorStorageMetadata)
        wanted: dict[str, Any] = {
            key: torch.empty(stored.size, dtype=stored.properties.dtype) if is_tensor else None  # type: ignore[union-attr]
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
    """

    kind: Literal["dcp", "fsdp1"] = "fsdp1"

    def __init__(self, model_file: Path) -> None:
        self.path = model_file
        model, _ = flatten_state_dict(_read(model_file))
        self._values = {f"{MODEL_PREFIX}{key}": value for key, value in model.items()}
        parsed = paths.parse_checkpoint_name(model_file)
        if parsed is not None:
            optimizer_file = Checkpoint(model_file, parsed[0], parsed[2]).optimizer_path
            if optimizer_file.is_file():
                self._values |= _flat_optimizer(_read(optimizer_file), optimizer_file)
        self.forms: Mapping[str, Form | None] = {
            key: _form(value.shape, value.dtype) if isinstance(value, Tensor) else None
            for key, value in self._values.items()
        }

    def read(self, key: str) -> Any:
        return self._values[key]


def compare(a: TensorSource, b: TensorSource) -> Iterator[Difference]:
    """Every key of both, one tensor of each in memory at a time; first in the order of A."""
    skipped = sections_left_out(a, b)
    keys = [*a.forms, *(key for key in b.forms if key not in a.forms)]
    for key in keys:
        if _section(key) in skipped:
            continue
        if key not in b.forms:
            yield Difference(key, "only in A", a=a.forms[key])
        elif key not in a.forms:
            yield Difference(key, "only in B", b=b.forms[key])
        else:
            yield _compare_key(key, a, b)


def sections_left_out(a: TensorSource, b: TensorSource) -> list[str]:
    """Parts such as ``optimizer`` that only one has and that are not compared, as files of full state may lack them."""
    if a.kind == b.kind == "dcp":
        return []
    in_a, in_b = ({_section(key) for key in source.forms} for source in (a, b))
    return sorted((in_a ^ in_b) - {_section(MODEL_PREFIX)})


def matching(keys: Iterable[str], pattern: str | None) -> list[str]:
    """The keys that a text is a part of, or that match it if it has ``*`` or ``?`` in it.

    Raises:
        CheckpointError: There is none.
    """
    names = list(keys)
    if pattern is None:
        return names
    is_glob = "*" in pattern or "?" in pattern
    found = [name for name in names if (fnmatchcase(name, pattern) if is_glob else pattern in name)]
    if not found:
        raise CheckpointError(f"no key matches `{pattern}`; {did_you_mean(pattern, names, 'keys')}")
    return found


def l2_norm(tensor: Tensor) -> float:
    """L2 norm, computed in double precision; of complex numbers that of their real and imaginary parts."""
    return math.sqrt(sum(float(block.square().sum()) for block in _blocks(tensor)))


def _compare_key(key: str, a: TensorSource, b: TensorSource) -> Difference:
    form_a, form_b = a.forms[key], b.forms[key]
    if form_a is None and form_b is None:
        one, other = a.read(key), b.read(key)
        if _is_same_value(one, other):
            return Difference(key, "equal")
        return Difference(key, "values", note=f"{one!r} / {other!r}"[:200])
    if form_a is None or form_b is None:
        return Difference(key, "dtype", form_a, form_b, note="a tensor in one, none in the other")
    if form_a.shape != form_b.shape:
        return Difference(key, "shape", form_a, form_b)
    if form_a.dtype != form_b.dtype:
        return Difference(key, "dtype", form_a, form_b)
    return _compare_tensors(key, form_a, form_b, a.read(key), b.read(key))


def _compare_tensors(key: str, form_a: Form, form_b: Form, one: Tensor, other: Tensor) -> Difference:
    if torch.equal(_bits(one), _bits(other)):
        return Difference(key, "equal", form_a, form_b)
    largest = squares = squares_of_a = 0.0
    for x, y in zip(_blocks(one), _blocks(other), strict=True):
        delta = (x - y).abs()
        delta[x == y] = 0  # infinities of the same sign do not differ
        # unlike Python's, torch's maximum keeps what is not a number
        largest = float(torch.stack((delta.max(), torch.tensor(largest, dtype=torch.float64))).max())
        squares += float(delta.square().sum())
        squares_of_a += float(x.square().sum())
    relative = math.sqrt(squares / squares_of_a) if squares_of_a else math.inf if squares else 0.0
    return Difference(key, "values", form_a, form_b, largest, relative)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    for start in range(0, flat.numel(), _BLOCK_ELEMENTS):
        yield flat[start : start + _BLOCK_ELEMENTS].to(torch.float64)


def _is_same_value(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same_value(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same_value, one, other))
    both_undefined = isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
    return both_undefined or bool(type(one) is type(other) and one == other)


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
            f"{OPTIMIZER_PREFIX}state.{name}.{key}": value
            for name, values in state["state"].items()
            for key, value in values.items()
        }
        for group in state["param_groups"]:
            for name in group["params"]:
                for key in group.keys() - {"params"}:
                    flat[f"{OPTIMIZER_PREFIX}param_groups.{name}.{key}"] = group[key]
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{file} holds no optimizer state; is it the model's file?") from None
    return flat


def _section(key: str) -> str:
    """``model`` of ``app.model.<name>``."""
    return ".".join(key.split(".")[:2]).removeprefix("app.").rstrip(".")


def _form(shape: Any, dtype: torch.dtype) -> Form:
    return Form(tuple(shape), str(dtype).removeprefix("torch."), math.prod(shape) * dtype.itemsize)
