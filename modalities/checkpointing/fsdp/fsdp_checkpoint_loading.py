"""Loading checkpoints into FSDP1 and FSDP2 models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import ShardingStrategy as TorchShardingStrategy
from torch.optim import Optimizer

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.interfaces import DistributedCheckpointLoadingIF, FSDP1CheckpointLoadingIF
from modalities.checkpointing.key_report import compare_keys, compare_tensors
from modalities.checkpointing.reading.load_planner import LoadingOptions
from modalities.checkpointing.reading.loading import HalfLoaded, load_
from modalities.checkpointing.safe_reading import read_state_file
from modalities.checkpointing.saving.saver import settle_all
from modalities.checkpointing.storage import as_location
from modalities.checkpointing.verification import Level, require_whole_file
from modalities.exceptions import CheckpointError
from modalities.models.materialization import materialize_for_loading_
from modalities.parallel.fsdp1 import load_full_optimizer_state_dict_, shard_model
from modalities.parallel.gradient_sync import is_sharded
from modalities.parallel.parameter_names import clean_name
from modalities.parallel.process_group import on_rank_zero
from modalities.parallel.settings import MixedPrecisionSettings, ShardingStrategy


class DCPCheckpointLoading(DistributedCheckpointLoadingIF):
    """Loads a checkpoint folder; each rank reads what its shards need, whatever world wrote it.

    Args:
        global_rank (int): Rank of this process.

    Attributes:
        options: What is loaded, and how thoroughly the checkpoint is checked; by default all, and fully.
    """

    def __init__(self, global_rank: int):
        self.global_rank = global_rank
        self.options = LoadingOptions()

    def load_checkpoint_(self, app_state: AppState, checkpoint_dir_path: Path) -> AppState:
        """Load a checkpoint folder into the app state, in place. The model must be sharded already.

        Args:
            app_state (AppState): Model, optimizer and scheduler as built.
            checkpoint_dir_path (Path): The checkpoint's folder.

        Returns:
            The app state that was passed.

        Raises:
            CheckpointError: The folder is absent or damaged, or was saved from another model; the app state is as it
                was. Or a save that was in flight has failed.
            HalfLoaded: Reading failed though the checkpoint had been found whole; the app state is of no more use.
        """
        settle_all()
        if app_state.is_loaded:
            app_state.mark_loaded()
        state = {"app": app_state.state_dict()}
        try:
            load_(state, as_location(checkpoint_dir_path), self.options)
        except HalfLoaded:
            app_state.mark_broken()
            raise
        app_state.load_state_dict(state["app"])
        return app_state


class FSDP1CheckpointLoading(FSDP1CheckpointLoadingIF):
    """Loads full model and optimizer files: rank 0 reads, FSDP1 shards.

    Args:
        global_rank (int): Rank of this process.
        block_names (list[str]): Class names of the layers that are sharded on their own.
        mixed_precision_settings (MixedPrecisionSettings): Precision under FSDP.
        sharding_strategy (ShardingStrategy): What is sharded, and over which ranks.

    Attributes:
        verify: How thoroughly a file is compared with the manifest beside it.
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
        self.verify: Level = "full"

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
            require_whole_file(file_path, self.verify)
            state = read_state_file(file_path)
            compare_tensors(model.state_dict(), state, file_path)
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
            require_whole_file(file_path, self.verify)
            read.update(read_state_file(file_path))
            if not {"state", "param_groups"} <= read.keys():
                raise CheckpointError(f"{file_path} holds no optimizer state; is it the model's file?")
            names = {clean_name(name) for name, p in model.named_parameters() if p.requires_grad}
            compare_keys(names, read["state"], file_path)

        on_rank_zero(load)
        load_full_optimizer_state_dict_(model, optimizer, read)
