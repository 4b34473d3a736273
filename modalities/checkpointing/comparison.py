"""How two checkpoints differ, of whatever kinds, one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor

from modalities.checkpointing.reading.sources import MODEL_PREFIX, Form, TensorSource
from modalities.config.suggestions import did_you_mean
from modalities.exceptions import CheckpointError

Status = Literal["equal", "only in A", "only in B", "shape", "dtype", "values"]

_BLOCK_ELEMENTS = 1 << 22
"""Computed with at a time in double precision, whatever the size of the tensor."""


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
        if is_same_value(one, other):
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


def is_same_value(one: Any, other: Any) -> bool:
    """Whether two plain values, or values with tensors in them, are the same; tensors bit for bit, undefined as equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same_value(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_same_value, one, other))
    both_undefined = isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
    return both_undefined or bool(type(one) is type(other) and one == other)


def _section(key: str) -> str:
    """``model`` of ``app.model.<name>``."""
    return ".".join(key.split(".")[:2]).removeprefix("app.").rstrip(".")
