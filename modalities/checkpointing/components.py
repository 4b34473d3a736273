"""Door sign of ``checkpointing/``: saving, loading and the state that is saved."""

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from modalities.parallel.settings import MixedPrecisionSettings, ShardingStrategy
from modalities.registry import places
from modalities.registry.fields import ComponentConfig, DefaultFrom, EnumField, ExistingFile, ExistingPath, Instance
from modalities.registry.interfaces import (
    Anything,
    AppState,
    CheckpointSaving,
    CheckpointSavingExecution,
    CheckpointSavingStrategy,
    DistributedCheckpointLoading,
    FSDP1CheckpointLoading,
    FSDP1Model,
    LRScheduler,
    Model,
    Optimizer,
    TorchCheckpointLoading,
)
from modalities.registry.spec import Sign

sign = Sign()

_SAVING = "modalities.checkpointing.fsdp.fsdp_checkpoint_saving"
_RETENTION = "modalities.checkpointing.retention"
_RESTORING = "modalities.checkpointing.restoring"
_VERIFY = "what is compared with the manifest before anything is loaded: all data, sizes, nothing"


class PrecisionEnum(Enum):
    """A floating-point type, as checkpoint loading names it."""

    FP32 = "float32"
    FP16 = "float16"
    BF16 = "bfloat16"


@sign.component(
    "checkpoint_saving",
    "default",
    builds="modalities.checkpointing.checkpoint_saving:CheckpointSaving",
    provides=CheckpointSaving,
)
class CheckpointSavingConfig(ComponentConfig):
    """Saving of checkpoints: which are kept, and how they are written."""

    checkpoint_saving_strategy: Instance[CheckpointSavingStrategy] = Field(description="which are written and kept")
    checkpoint_saving_execution: Instance[CheckpointSavingExecution] = Field(description="how they are written")


@sign.component(
    "checkpoint_saving_strategy",
    "save_k_most_recent_checkpoints_strategy",
    builds=f"{_RETENTION}:SaveKMostRecentCheckpointsStrategy",
    provides=CheckpointSavingStrategy,
)
class SaveKMostRecentConfig(ComponentConfig):
    """Keep the newest checkpoints."""

    k: int = Field(strict=True, ge=-1, description="how many are kept; -1 keeps all, 0 saves none")


@sign.component(
    "checkpoint_saving_strategy",
    "keep_every_n_steps_strategy",
    builds=f"{_RETENTION}:KeepEveryNStepsStrategy",
    provides=CheckpointSavingStrategy,
)
class KeepEveryNStepsConfig(ComponentConfig):
    """Keep milestones for good."""

    n: int = Field(gt=0, description="steps between two checkpoints that are kept")


@sign.component(
    "checkpoint_saving_strategy",
    "keep_best_k_strategy",
    builds=f"{_RETENTION}:KeepBestKStrategy",
    provides=CheckpointSavingStrategy,
)
class KeepBestKConfig(ComponentConfig):
    """Keep the checkpoints with the best values of a metric."""

    k: int = Field(gt=0, description="how many are kept")
    metric: str = Field(min_length=1, description="name of the metric, such as `heldout loss`")
    best: Literal["lowest", "highest"] = Field("lowest", description="which value is best")


@sign.component(
    "checkpoint_saving_strategy",
    "keep_one_per_period_strategy",
    builds=f"{_RETENTION}:KeepOnePerPeriodStrategy",
    provides=CheckpointSavingStrategy,
)
class KeepOnePerPeriodConfig(ComponentConfig):
    """Keep the first checkpoint of every period of time."""

    hours: float = Field(gt=0, description="length of a period, in hours")


@sign.component(
    "checkpoint_saving_strategy",
    "combined_strategy",
    builds=f"{_RETENTION}:CombinedCheckpointSavingStrategy",
    provides=CheckpointSavingStrategy,
)
class CombinedStrategyConfig(ComponentConfig):
    """Save when one of several strategies wants it, and keep what one of them wants kept."""

    strategies: list[Instance[CheckpointSavingStrategy]] = Field(min_length=1, description="the strategies")


@sign.component(
    "checkpoint_saving_strategy",
    "save_every_k_steps_checkpointing_strategy",
    builds=f"{_RETENTION}:SaveEveryKStepsCheckpointingStrategy",
    provides=CheckpointSavingStrategy,
)
class SaveEveryKStepsConfig(ComponentConfig):
    """Save every k-th step and keep all."""

    k: int = Field(gt=0, description="steps between two checkpoints")


_MODE = Field(
    None,
    description="async writes beside training, sync while training waits; by default async where memory allows",
)
_UPLOAD = Field(
    None, min_length=1, description="folder or URL (s3://…) that committed checkpoints are copied to beside training"
)
_TIMEOUT = Field(1800.0, gt=0, description="seconds after which a save has failed")


class _FullSavingConfig(ComponentConfig):
    k: int = Field(-1, strict=True, ge=-1, description="how many checkpoints are kept; -1 keeps all, 0 saves none")
    every: Annotated[int, DefaultFrom("settings.intervals.checkpointing_interval_in_steps")] = Field(
        gt=0, description="steps between two checkpoints; a multiple of the interval at which saving is asked for"
    )
    checkpoint_path: Annotated[Path, places.CHECKPOINT_PATH] = Field(
        description="folder that holds the checkpoints; made if absent"
    )
    global_rank: Annotated[int, places.GLOBAL_RANK] = Field(strict=True, ge=0, description="rank of this process")
    experiment_id: Annotated[str, places.EXPERIMENT_ID] = Field(
        min_length=1, description="ID of the experiment, part of every checkpoint's name"
    )


_TAKES_OVER = {
    "k": ("checkpoint_saving_strategy/save_k_most_recent_checkpoints_strategy.k",),
    "every": ("checkpoint_saving_strategy/save_every_k_steps_checkpointing_strategy.k",),
    "checkpoint_path": ("checkpoint_saving_execution.checkpoint_path",),
    "global_rank": ("checkpoint_saving_execution.global_rank",),
    "experiment_id": ("checkpoint_saving_execution.experiment_id",),
}


@sign.component(
    "checkpoint_saving",
    "dcp",
    builds="modalities.checkpointing.checkpoint_saving:make_dcp_checkpoint_saving",
    provides=CheckpointSaving,
    takes_over=_TAKES_OVER,
)
class DCPFullSavingConfig(_FullSavingConfig):
    """Each rank writes its own shards; the newest checkpoints are kept."""

    mode: Literal["async", "sync"] | None = _MODE
    timeout_s: float = _TIMEOUT
    upload_to: str | None = _UPLOAD


@sign.component(
    "checkpoint_saving",
    "fsdp1",
    builds="modalities.checkpointing.checkpoint_saving:make_fsdp1_checkpoint_saving",
    provides=CheckpointSaving,
    takes_over=_TAKES_OVER,
)
class FSDP1FullSavingConfig(_FullSavingConfig):
    """Rank 0 writes full model and optimizer files; the newest checkpoints are kept."""


class _SavingExecutionConfig(ComponentConfig):
    checkpoint_path: Annotated[Path, places.CHECKPOINT_PATH] = Field(
        description="folder that holds the checkpoints; made if absent"
    )
    global_rank: Annotated[int, places.GLOBAL_RANK] = Field(strict=True, ge=0, description="rank of this process")
    experiment_id: Annotated[str, places.EXPERIMENT_ID] = Field(
        min_length=1, description="ID of the experiment, part of every checkpoint's name"
    )


@sign.component(
    "checkpoint_saving_execution",
    "dcp",
    builds="modalities.checkpointing.checkpoint_saving:make_dcp_execution",
    provides=CheckpointSavingExecution,
)
class DCPCheckpointSavingConfig(_SavingExecutionConfig):
    """Each rank writes its own shards into one folder."""

    mode: Literal["async", "sync"] | None = _MODE
    timeout_s: float = _TIMEOUT
    upload_to: str | None = _UPLOAD


@sign.component(
    "checkpoint_saving_execution",
    "fsdp1",
    builds=f"{_SAVING}:FSDP1CheckpointSaving",
    provides=CheckpointSavingExecution,
)
class FSDP1CheckpointSavingConfig(_SavingExecutionConfig):
    """Rank 0 writes the full model and the full optimizer state, a file each."""


@sign.component(
    "checkpoint_loading",
    "dcp",
    builds=f"{_RESTORING}:make_dcp_loading",
    provides=DistributedCheckpointLoading,
)
class DCPCheckpointLoadingConfig(ComponentConfig):
    """Each rank reads what its shards need from a checkpoint folder."""

    global_rank: Annotated[int, places.GLOBAL_RANK] = Field(strict=True, ge=0, description="rank of this process")
    verify: Literal["full", "sizes", "off"] = Field("full", description=_VERIFY)
    strict: bool = Field(True, description="the checkpoint has every key of the run, and the other way round")
    include: list[str] | None = Field(
        None, description="patterns of keys that are loaded, such as `model.transformer.h.*`; by default all"
    )
    exclude: list[str] = Field([], description="patterns of keys that are not loaded, such as `optimizer.*`")
    allow_cast: bool = Field(False, description="convert tensors that are of another type in the checkpoint")


@sign.component(
    "checkpoint_loading", "fsdp1", builds=f"{_RESTORING}:make_fsdp1_loading", provides=FSDP1CheckpointLoading
)
class FSDP1CheckpointLoadingConfig(ComponentConfig):
    """Rank 0 reads full files; the model is wrapped with FSDP1 and sharded."""

    global_rank: Annotated[int, places.GLOBAL_RANK] = Field(strict=True, ge=0, description="rank of this process")
    block_names: Annotated[list[str], DefaultFrom("app_state.model.block_names")] = Field(
        min_length=1, description="class names of the layers that are sharded on their own"
    )
    mixed_precision_settings: Annotated[
        EnumField[MixedPrecisionSettings], DefaultFrom("app_state.model.mixed_precision_settings")
    ] = Field(description="precision under FSDP")
    sharding_strategy: Annotated[EnumField[ShardingStrategy], DefaultFrom("app_state.model.sharding_strategy")] = Field(
        description="what is sharded, and over which ranks"
    )
    verify: Literal["full", "sizes", "off"] = Field("full", description=_VERIFY)


@sign.component(
    "checkpoint_loading",
    "torch",
    builds="modalities.checkpointing.torch_checkpoint_loading:make_torch_checkpoint_loading",
    provides=TorchCheckpointLoading,
)
class TorchCheckpointLoadingConfig(ComponentConfig):
    """One process reads the weights of a model, for inference."""

    device: int | str = Field(description="cpu, cuda:N, or N for the accelerator of that number")
    precision: EnumField[PrecisionEnum] | None = Field(None, description="type that the weights are converted to")


@sign.component("app_state", "raw", builds="modalities.checkpointing.app_state:make_app_state", provides=AppState)
class RawAppStateConfig(ComponentConfig):
    """Model, optimizer and learning-rate scheduler, as built."""

    model: Annotated[Instance[Model] | list[Instance[Model]], DefaultFrom("model")] = Field(
        description="the model, or its parts"
    )
    optimizer: Annotated[Instance[Optimizer], DefaultFrom("optimizer")] = Field(
        description="the optimizer over the model's parameters"
    )
    lr_scheduler: Annotated[Instance[LRScheduler] | None, DefaultFrom("lr_scheduler")] = Field(
        None, description="the scheduler over the optimizer"
    )


@sign.component("app_state", "dcp", builds=f"{_RESTORING}:load_app_state", provides=AppState, wraps=("raw_app_state",))
class DCPAppStateConfig(ComponentConfig):
    """An app state loaded from a DCP checkpoint."""

    raw_app_state: Instance[AppState] = Field(description="the app state as built")
    checkpoint_dir_path: ExistingPath = Field(description="folder of the checkpoint")
    checkpoint_loading: Annotated[Instance[DistributedCheckpointLoading] | None, DefaultFrom("checkpoint_loading")] = (
        Field(None, description="how it is read; by default the config's own `checkpoint_loading`, if it has one")
    )


@sign.component(
    "model",
    "fsdp1_checkpointed",
    builds=f"{_RESTORING}:load_fsdp1_model",
    provides=Anything,
    wraps=("model", "checkpoint_loading"),
)
class FSDP1CheckpointedModelConfig(ComponentConfig):
    """A model whose weights come from a checkpoint file; wrapped with FSDP1, if the loading does so."""

    checkpoint_loading: Instance[FSDP1CheckpointLoading] | Instance[TorchCheckpointLoading] = Field(
        description="how the file is loaded: fsdp1 wraps the model and shards it, torch leaves it whole"
    )
    checkpoint_path: ExistingFile = Field(description="the model file")
    model: Instance[Model] = Field(description="the model as built, unwrapped")


@sign.component(
    "optimizer",
    "fsdp1_checkpointed",
    builds=f"{_RESTORING}:load_fsdp1_optimizer",
    provides=Optimizer,
    wraps=("optimizer",),
)
class FSDP1CheckpointedOptimizerConfig(ComponentConfig):
    """An optimizer over an FSDP1 model whose state comes from a checkpoint file."""

    checkpoint_loading: Instance[FSDP1CheckpointLoading] = Field(description="how the file is loaded")
    checkpoint_path: ExistingFile = Field(description="the optimizer file")
    wrapped_model: Instance[FSDP1Model] = Field(description="the model wrapped with FSDP1")
    optimizer: Instance[Optimizer] = Field(description="the optimizer as built")
