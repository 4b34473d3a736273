"""One readable table where a checkpoint and a run differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modalities.config.suggestions import nearest
from modalities.exceptions import CheckpointError

_SHOWN = 8


@dataclass(frozen=True)
class TensorForm:
    """What must agree for a tensor to be loaded.

    Args:
        shape: Global.
        dtype: None where it does not matter.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class KeyComparison:
    """What a run has and what a checkpoint has.

    Args:
        own: By key; None for what is no tensor.
        saved: By key; None for what is no tensor.
        strict: Whether keys that only one of them has are faults.
        allow_cast: Whether types may differ.
    """

    own: Mapping[str, TensorForm | None]
    saved: Mapping[str, TensorForm | None]
    strict: bool = True
    allow_cast: bool = False

    @property
    def missing(self) -> list[str]:
        return [key for key in self.own if key not in self.saved]

    @property
    def unexpected(self) -> list[str]:
        return [key for key in self.saved if key not in self.own]

    @property
    def reshaped(self) -> list[str]:
        return [key for key, own, saved in self._common() if (own and own.shape) != (saved and saved.shape)]

    @property
    def retyped(self) -> list[str]:
        return [
            key
            for key, own, saved in self._common()
            if own is not None and saved is not None and None not in (own.dtype, saved.dtype)
            if own.dtype != saved.dtype
        ]

    def _common(self) -> list[tuple[str, TensorForm | None, TensorForm | None]]:
        return [(key, own, self.saved[key]) for key, own in self.own.items() if key in self.saved]


def report_of(comparison: KeyComparison, checkpoint: Path) -> str | None:
    """All differences that forbid loading, in words; None if there are none."""
    missing = comparison.missing if comparison.strict else []
    unexpected = comparison.unexpected if comparison.strict else []
    reshaped, retyped = comparison.reshaped, [] if comparison.allow_cast else comparison.retyped
    if not (missing or unexpected or reshaped or retyped):
        return None
    lines = [f"the checkpoint {checkpoint} is of another model:"]
    for key in missing[:_SHOWN]:
        near = nearest(key, comparison.unexpected, limit=1)
        lines.append(f"  missing     {key}" + (f" (the checkpoint has {near[0]})" if near else ""))
    for key in unexpected[:_SHOWN]:
        near = nearest(key, comparison.missing, limit=1)
        lines.append(f"  unexpected  {key}" + (f" (the run has {near[0]})" if near else ""))
    for key in reshaped[:_SHOWN]:
        own, saved = _shape(comparison.own[key]), _shape(comparison.saved[key])
        lines.append(f"  shape       {key}: {saved} in the checkpoint, {own} in the model")
    for key in retyped[:_SHOWN]:
        own, saved = _dtype(comparison.own[key]), _dtype(comparison.saved[key])
        lines.append(f"  dtype       {key}: {saved} in the checkpoint, {own} in the model")
    counts = [
        f"{len(missing)} missing",
        f"{len(unexpected)} unexpected",
        f"{len(reshaped)} of another shape",
        f"{len(retyped)} of another dtype",
    ]
    lines.append(f"  {', '.join(counts)}; nothing was loaded")
    if retyped and not (missing or unexpected or reshaped):
        lines.append("  checkpoint_loading with allow_cast: true converts them")
    elif missing or unexpected:
        lines.append("  checkpoint_loading with strict: false, include or exclude loads a part")
    return "\n".join(lines)


def compare_tensors(own: Mapping[str, Tensor], saved: Mapping[str, Tensor], checkpoint: Path) -> None:
    """Check that a checkpoint holds the tensors of a model, no more and no fewer, in the same shapes and types.

    Args:
        own: By name, as the run has them.
        saved: By name, as the checkpoint has them.
        checkpoint: For the message.

    Raises:
        CheckpointError: They differ; all differences are told together.
    """
    own_forms, saved_forms = (
        {key: TensorForm(tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
        for tensors in (own, saved)
    )
    if (report := report_of(KeyComparison(own_forms, saved_forms), checkpoint)) is not None:
        raise CheckpointError(report)


def compare_keys(own: Iterable[str], saved: Iterable[str], checkpoint: Path) -> None:
    """Check that a checkpoint has the keys of a run, no more and no fewer.

    Raises:
        CheckpointError: It has not; all differences are told together.
    """
    comparison = KeyComparison(dict.fromkeys(own), dict.fromkeys(saved))
    if (report := report_of(comparison, checkpoint)) is not None:
        raise CheckpointError(report)


def _shape(form: TensorForm | None) -> str:
    return str(form.shape) if form is not None else "no tensor"


def _dtype(form: TensorForm | None) -> str:
    return str(form.dtype).removeprefix("torch.") if form is not None else "no tensor"
