"""One readable message where a checkpoint and a model differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from modalities.config.suggestions import nearest
from modalities.exceptions import CheckpointError

_SHOWN = 8


def compare_tensors(own: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]], checkpoint: Path) -> None:
    """Check that a checkpoint holds the tensors of a model, no more and no fewer, in the same shapes.

    Args:
        own: Shapes by name as the run has them.
        saved: Shapes by name as the checkpoint has them.
        checkpoint: For the message.

    Raises:
        CheckpointError: Names or shapes differ; all differences are told together.
    """
    missing = [name for name in own if name not in saved]
    unexpected = [name for name in saved if name not in own]
    reshaped = [name for name in own if name in saved and own[name] != saved[name]]
    if not (missing or unexpected or reshaped):
        return
    lines = [f"the checkpoint {checkpoint} is of another model:"]
    for name in missing[:_SHOWN]:
        near = nearest(name, unexpected, limit=1)
        lines.append(f"  missing     {name}" + (f" (the checkpoint has {near[0]})" if near else ""))
    lines += [f"  unexpected  {name}" for name in unexpected[:_SHOWN]]
    lines += [
        f"  shape       {name}: {saved[name]} in the checkpoint, {own[name]} in the model" for name in reshaped[:_SHOWN]
    ]
    counts = f"{len(missing)} missing, {len(unexpected)} unexpected, {len(reshaped)} of another shape"
    raise CheckpointError("\n".join([*lines, f"  {counts}; nothing was loaded"]))
