"""Loading weights into an unsharded model on one process, for inference."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from modalities.checkpointing.failures import causes_of
from modalities.checkpointing.fsdp.fsdp_checkpoint_loading import read_state_file
from modalities.checkpointing.key_report import compare_tensors
from modalities.checkpointing.safe_reading import SafeFileSystemReader, load_on_one_process
from modalities.exceptions import CheckpointError
from modalities.models.materialization import materialize_for_loading_
from modalities.parallel.process_group import machine_device

_MODEL_PREFIX = "app.model."


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
            self._load_folder(model, file_path)
        else:
            state = read_state_file(file_path)
            own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
            compare_tensors(own, {name: tuple(tensor.shape) for name, tensor in state.items()}, file_path)
            model.load_state_dict(state)
        return model.to(device=self.device, dtype=self.precision)

    @staticmethod
    def _load_folder(model: nn.Module, folder: Path) -> None:
        reader = SafeFileSystemReader(folder)
        own = model.state_dict()
        saved = {
            name.removeprefix(_MODEL_PREFIX): tuple(metadata.size)
            for name, metadata in reader.read_metadata().state_dict_metadata.items()
            if name.startswith(_MODEL_PREFIX) and isinstance(metadata, TensorStorageMetadata)
        }
        compare_tensors({name: tuple(tensor.shape) for name, tensor in own.items()}, saved, folder)
        try:
            load_on_one_process({"app": {"model": own}}, reader)
        except CheckpointException as error:
            raise CheckpointError(f"the checkpoint {folder} cannot be read: {causes_of(error)}") from error
        model.load_state_dict(own)


class _Precision(Protocol):
    value: str


def make_torch_checkpoint_loading(device: int | str, precision: _Precision | None) -> TorchCheckpointLoading:
    """Builder of ``checkpoint_loading: torch``."""
    accelerator = machine_device().type
    name = f"{accelerator}:{device}" if isinstance(device, int) else device
    return TorchCheckpointLoading(torch.device(name), getattr(torch, precision.value) if precision else None)
