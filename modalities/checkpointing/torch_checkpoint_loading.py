"""Loading weights into an unsharded model on one process, for inference."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from modalities.checkpointing.key_report import compare_tensors
from modalities.checkpointing.reading.load_planner import LoadingOptions
from modalities.checkpointing.reading.loading import load_
from modalities.checkpointing.safe_reading import read_state_file
from modalities.checkpointing.verification import require_whole_file
from modalities.models.materialization import materialize_for_loading_
from modalities.parallel.process_group import machine_device


class TorchCheckpointLoading:
    """Loads the weights of a model from a full model file or from a DCP folder.

    Args:
        device: Where the model shall be; None for this machine's device.
        precision: Type that the weights are converted to, if given.
    """

    def __init__(self, device: torch.device | None, precision: torch.dtype | None = None) -> None:
        self.device = device or machine_device()
        self.precision = precision

    def load_model_checkpoint(self, model: nn.Module, file_path: Path) -> nn.Module:
        """Load weights into the model, in place, and move it to the device.

        Args:
            model: As built, unwrapped; may be on the meta device.
            file_path: A full model file or the folder of a DCP checkpoint.

        Raises:
            CheckpointError: It is absent, damaged, or of another model.
        """
        materialize_for_loading_(model)
        if file_path.is_dir():
            state = {"app": {"model": model.state_dict()}}
            options = LoadingOptions(include=["app.model.*"], allow_cast=self.precision is not None)
            load_(state, file_path, options)
            model.load_state_dict(state["app"]["model"])
        else:
            require_whole_file(file_path)
            full_state = read_state_file(file_path)
            if self.precision is not None:
                full_state = {name: tensor.to(self.precision) for name, tensor in full_state.items()}
                model.to(self.precision)
            compare_tensors(model.state_dict(), full_state, file_path)
            model.load_state_dict(full_state)
        return model.to(device=self.device, dtype=self.precision)


class _Precision(Protocol):
    value: str


def make_torch_checkpoint_loading(device: int | str, precision: _Precision | None) -> TorchCheckpointLoading:
    """Builder of ``checkpoint_loading: torch``."""
    accelerator = machine_device().type
    name = f"{accelerator}:{device}" if isinstance(device, int) else device
    return TorchCheckpointLoading(torch.device(name), getattr(torch, precision.value) if precision else None)
