"""Small checkpoints as other tools write them: without a manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from modalities.checkpointing.paths import checkpoint_name
from modalities.progress import TrainingProgress


def progress_at(step: int) -> TrainingProgress:
    return TrainingProgress(step, step * 64, 100, 6400)


def model_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "block.weight": torch.randn(16, 8, generator=generator),
        "block.bias": torch.randn(16, generator=generator),
        "head": torch.randn(8, generator=generator).to(torch.bfloat16),
    }


def dcp_sample(
    folder: Path, step: int, model: dict[str, Tensor] | None = None, experiment_id: str = "run-1", **more: Any
) -> Path:
    """A DCP folder of a stock writer."""
    model = model_of(step) if model is None else model
    optimizer: dict[str, Any] = {}
    for name, tensor in model.items():
        optimizer |= {f"state.{name}.exp_avg": tensor * 2, f"param_groups.{name}.betas": (0.9, 0.95)}
    path = folder / checkpoint_name(experiment_id, progress_at(step))
    dcp.save({"app": {"model": model, "optimizer": optimizer, **more}}, checkpoint_id=path, no_dist=True)
    return path


def fsdp1_sample(
    folder: Path, step: int, model: dict[str, Tensor] | None = None, experiment_id: str = "run-1", **more: Any
) -> Path:
    """Full files with the same content as :func:`dcp_sample`; gives the model's file."""
    model = model_of(step) if model is None else model
    state = {name: {"exp_avg": tensor * 2} for name, tensor in model.items()}
    groups = [{"params": list(model), "betas": (0.9, 0.95)}]
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"state": state, "param_groups": groups}, folder / _name(experiment_id, step, "optimizer"))
    torch.save({**model, **more}, folder / _name(experiment_id, step, "model"))
    return folder / _name(experiment_id, step, "model")


def _name(experiment_id: str, step: int, entity: str) -> str:
    return checkpoint_name(experiment_id, progress_at(step), entity)


def flip_a_bit(path: Path, position: int = -1) -> None:
    """Change one bit of a byte in the file, by default in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position < 0 else position] ^= 1
    path.write_bytes(content)
