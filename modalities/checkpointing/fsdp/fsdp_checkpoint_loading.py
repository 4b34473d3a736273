"""Loading checkpoints into FSDP1 and FSDP2 models."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import ShardingStrategy as TorchShardingStrategy
from torch.optim import Optimizer

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.failures import causes_of
from modalities.checkpointing.interfaces import DistributedCheckpointLoadingIF, FSDP1CheckpointLoadingIF
from modalities.checkpointing.key_report import compare_tensors
from modalities.checkpointing.safe_reading import SafeFileSystemReader, SafeLoadPlanner
from modalities.exceptions import CheckpointError
from modalities.models.materialization import materialize_for_loading_
from modalities.parallel.fsdp1 import load_full_optimizer_state_dict_, shard_model
from modalities.parallel.gradient_sync import is_sharded
from modalities.parallel.parameter_names import clean_name
from modalities.parallel.process_group import fail_together, on_rank_zero
from modalities.parallel.settings import MixedPrecisionSettings, ShardingStrategy


class DCPCheckpointLoading(DistributedCheckpointLoadingIF):
    """Loads a checkpoint folder; each rank reads what its shards need, whatever world wrote it.

    Args:
        global_rank (int): Rank of this process.
    """

    def __init__(self, global_rank: int):
        self.global_rank = global_rank

    def load_checkpoint_(self, app_state: AppState, checkpoint_dir_path: Path) -> AppState:
        """Load a checkpoint folder into the app state, in place. The model must be sharded already.

        Args:
            app_state (AppState): Model, optimizer and scheduler as built.
            checkpoint_dir_path (Path): The checkpoint's folder.

        Returns:
            The app state that was passed.

        Raises:
            CheckpointError: The folder is absent or damaged, or was saved from another model; checked before a tensor
                of the app state is touched.
        """
        if app_state.is_loaded:
            app_state.mark_loaded()
        reader = SafeFileSystemReader(checkpoint_dir_path)
        problem: Exception | None = None
        try:
            _check_folder(checkpoint_dir_path)
            _check_fit({"app": app_state.state_dict()}, reader.read_metadata(), checkpoint_dir_path)
        except CheckpointError as error:
            problem = error
        fail_together(problem)
        try:
            dcp.load({"app": app_state}, storage_reader=reader, planner=SafeLoadPlanner())
        except CheckpointException as error:
            raise CheckpointError(f"the checkpoint {checkpoint_dir_path} cannot be read: {causes_of(error)}") from error
        return app_state


class FSDP1CheckpointLoading(FSDP1CheckpointLoadingIF):
    """Loads full model and optimizer files: rank 0 reads, FSDP1 shards.

    Args:
        global_rank (int): Rank of this process.
        block_names (list[str]): Class names of the layers that are sharded on their own.
        mixed_precision_settings (MixedPrecisionSettings): Precision under FSDP.
        sharding_strategy (ShardingStrategy): What is sharded, and over which ranks.
    """

    def __init__(
        self,
        global_rank: int,
        block_names: list[str],
        mixed_precision_settings: MixedPrecisionSettings,
        sharding_strategy: ShardingStrategy | TorchShardingStrategy,
    ):
        self.global_rank = global_rank
        self.block_names = block_names
        self.mixed_precision_settings = mixed_precision_settings
        self.sharding_strategy = sharding_strategy

    def load_model_checkpoint(self, model: nn.Module, file_path: Path) -> nn.Module:
        """Load a full state dict into the model on rank 0, then wrap and shard it over the ranks.

        Args:
            model (nn.Module): The model as built, unwrapped.
            file_path (Path): The model file.

        Returns:
            nn.Module: The model wrapped with FSDP1.

        Raises:
            CheckpointError: The file is absent, damaged, or of another model.
        """
        if is_sharded(model):
            raise CheckpointError("load_model_checkpoint wraps the model itself; pass it unwrapped")
        materialize_for_loading_(model)

        def load() -> None:
            state = read_state_file(file_path)
            own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
            compare_tensors(own, {name: tuple(tensor.shape) for name, tensor in state.items()}, file_path)
            model.load_state_dict(state)

        on_rank_zero(load)
        return shard_model(model, True, self.mixed_precision_settings, self.sharding_strategy, self.block_names)

    def load_optimizer_checkpoint_(
        self, optimizer: Optimizer, model: FullyShardedDataParallel, file_path: Path
    ) -> None:
        """Load a full optimizer state on rank 0 and scatter it, in place.

        Args:
            optimizer (Optimizer): Over the model's parameters.
            model (FSDP): The model wrapped with FSDP1.
            file_path (Path): The optimizer file.

        Raises:
            CheckpointError: The file is absent, damaged, or of another model.
        """
        read: dict[str, Any] = {}

        def load() -> None:
            read.update(read_state_file(file_path))
            if not {"state", "param_groups"} <= read.keys():
                raise CheckpointError(f"{file_path} holds no optimizer state; is it the model's file?")
            names = {clean_name(name) for name, p in model.named_parameters() if p.requires_grad}
            compare_tensors(dict.fromkeys(names, ()), dict.fromkeys(read["state"], ()), file_path)

        on_rank_zero(load)
        load_full_optimizer_state_dict_(model, optimizer, read)


def read_state_file(file_path: Path) -> dict[str, Any]:
    """Read a file of full state without running code from it.

    Raises:
        CheckpointError: It is absent, damaged or holds more than tensors and plain values.
    """
    if not file_path.is_file():
        raise CheckpointError(f"no such checkpoint file: {file_path}")
    try:
        state = torch.load(file_path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"the checkpoint file {file_path} cannot be read: {reason}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file_path} holds a {type(state).__name__}, not a state dict")
    return state


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise CheckpointError(f"no such checkpoint: {folder}")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; a DCP checkpoint is a folder")
    if not (folder / ".metadata").is_file():
        raise CheckpointError(f"{folder} is no DCP checkpoint, or an unfinished one: it has no .metadata")


def _check_fit(state: dict[str, Any], metadata: Metadata, folder: Path) -> None:
    """Compare names and shapes before a byte of data is read."""
    own, _ = flatten_state_dict(state)
    saved = metadata.state_dict_metadata
    shapes = {name: tuple(value.shape) for name, value in own.items() if isinstance(value, torch.Tensor)}
    saved_shapes = {name: tuple(m.size) for name, m in saved.items() if isinstance(m, TensorStorageMetadata)}
    compare_tensors(shapes, {n: s for n, s in saved_shapes.items() if n in shapes or n.startswith("app.")}, folder)
    absent = [name for name in own if name not in saved]
    if absent:
        raise CheckpointError(
            f"the checkpoint {folder} lacks {len(absent)} values that this run needs, such as {', '.join(absent[:5])}; "
            "is the optimizer or the learning-rate scheduler another one?"
        )
