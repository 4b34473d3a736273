"""Top level of a training YAML: the slots that a run reads. Free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from modalities.registry.fields import EnumField, Instance
from modalities.registry.interfaces import (
    AppState,
    CheckpointSaving,
    DataLoader,
    Dataset,
    DeviceMesh,
    GradientClipper,
    Loss,
    MFUCalculator,
    Model,
    ProgressSubscriber,
    ResultsSubscriber,
)
from modalities.training.settings import Autocast

Count = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[int, Field(strict=True, ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class ReferencingKeys(_Section):
    """Names under which tensors travel from the data to the loss."""

    model_config = ConfigDict(extra="allow")


class CudaEnv(_Section):
    """Ranks as the launcher set them."""

    local_rank: Count = 0
    global_rank: Count = 0
    world_size: Positive = 1


class Paths(_Section):
    """Paths of the experiment; further names are free."""

    model_config = ConfigDict(extra="allow")

    experiments_root_path: Path | None = Field(None, description="folder of all runs; the command line sets it")


class IntervalSettings(_Section):
    """How often something is done, in optimizer steps; each is done after the last step too."""

    training_log_interval_in_steps: Positive
    checkpointing_interval_in_steps: Positive
    evaluation_interval_in_steps: Positive


class ConsistencyEnforcement(_Section):
    """Whether a mismatch of numbers is an error (true) or a warning (false).

    The last step is always logged, evaluated and checkpointed, so the three settings about it never fail.
    """

    enforce_tokens_per_step_consistency: bool = True
    enforce_last_step_logged: bool = True
    enforce_last_step_evaluated: bool = True
    enforce_last_step_checkpointed: bool = True
    enforce_enough_tokens_in_dataset: bool = True


class StepProfileSettings(_Section):
    """Shape of an optimizer step."""

    gradient_accumulation_steps: Positive
    local_train_micro_batch_size: Positive
    sequence_length: Positive
    dp_degree: Positive


class TrainingTarget(_Section):
    """Where the run ends."""

    num_target_tokens: Positive
    num_target_steps: Positive


class TrainingProgressSettings(_Section):
    """Where the run starts; zeros for a fresh run. ``--resume`` takes the checkpoint's counters instead."""

    global_num_seen_tokens: Count = 0
    num_seen_steps: Count = 0
    num_seen_samples: Count = 0
    last_step: Annotated[int, Field(strict=True, ge=-1)] = -1


class WarmstartCheckpointPaths(_Section):
    """The checkpoint that a warm start loads."""

    checkpoint_folder_path: Path | None = None
    model_checkpoint_path: Path | None = None
    optimizer_checkpoint_path: Path | None = None


class Settings(_Section):
    """Everything of a run that is no component."""

    experiment_id: str = Field(min_length=1)
    config_file_path: Path
    referencing_keys: ReferencingKeys
    cuda_env: CudaEnv = Field(default_factory=CudaEnv)
    paths: Paths = Field(default_factory=Paths)
    intervals: IntervalSettings
    consistency_enforcement: ConsistencyEnforcement = Field(default_factory=ConsistencyEnforcement)
    step_profile: StepProfileSettings
    training_target: TrainingTarget
    training_progress: TrainingProgressSettings = Field(default_factory=TrainingProgressSettings)
    warmstart_checkpoint_paths: WarmstartCheckpointPaths | None = None
    seed: Count = Field(42, lt=2**62, description="of dropout, and of weights where the model names no seed")
    autocast: EnumField[Autocast] = Field(
        Autocast.NONE, description="precision of unwrapped models; auto takes bf16 where the processor is fast in it"
    )


class TrainingRecipe(BaseModel):
    """The slots of a training run, in the order in which they are built."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    settings: Settings
    train_dataset: Instance[Dataset]
    train_dataloader: Instance[DataLoader]
    eval_dataloaders: list[Instance[DataLoader]] = Field(default_factory=list)
    loss_fn: Instance[Loss]
    device_mesh: Instance[DeviceMesh] | None = None
    model_raw: Instance[Model] | None = None
    app_state: Instance[AppState]
    gradient_clipper: Instance[GradientClipper]
    checkpoint_saving: Instance[CheckpointSaving]
    mfu_calculator: Instance[MFUCalculator] | None = None
    progress_subscriber: Instance[ProgressSubscriber] | None = None
    evaluation_subscriber: Instance[ResultsSubscriber] | None = None
