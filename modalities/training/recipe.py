"""Top level of a training YAML: the slots that a run reads. Free of torch."""

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from modalities.registry.fields import DefaultFrom, EnumField, Instance
from modalities.registry.interfaces import (
    AppState,
    CheckpointLoading,
    CheckpointSaving,
    CollateFn,
    DataLoader,
    Dataset,
    DebuggingSettings,
    DeviceMesh,
    GradientClipper,
    Loss,
    LRScheduler,
    MFUCalculator,
    Model,
    Optimizer,
    Pipeline,
    Profiler,
    ProgressSubscriber,
    ResultsSubscriber,
    SteppableComponent,
    Tokenizer,
)
from modalities.registry.rules import Rule
from modalities.training.rules import TRAINING_RULES
from modalities.training.settings import Autocast

Count = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[int, Field(strict=True, ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(defer_build=True, extra="forbid", arbitrary_types_allowed=True)


class ReferencingKeys(_Section):
    """Names under which tensors travel from the data to the loss."""

    model_config = ConfigDict(defer_build=True, extra="allow")


class CudaEnv(_Section):
    """Ranks as the launcher set them."""

    local_rank: Annotated[Count, DefaultFrom("${cuda_env:LOCAL_RANK}")] = Field(0, description="rank on this machine")
    global_rank: Annotated[Count, DefaultFrom("${cuda_env:RANK}")] = Field(0, description="rank in the job")
    world_size: Annotated[Positive, DefaultFrom("${cuda_env:WORLD_SIZE}")] = Field(1, description="number of ranks")


class Paths(_Section):
    """Paths of the experiment; further names are free."""

    model_config = ConfigDict(defer_build=True, extra="allow")

    experiments_root_path: Annotated[Path | None, DefaultFrom("${modalities_env:experiments_root_path}")] = Field(
        None, description="folder of all runs; the command line sets it"
    )


class IntervalSettings(_Section):
    """How often something is done, in optimizer steps; each is done after the last step too."""

    training_log_interval_in_steps: Positive = Field(description="steps between two logged training figures")
    checkpointing_interval_in_steps: Positive = Field(description="steps between two checkpoints")
    evaluation_interval_in_steps: Positive = Field(description="steps between two evaluations")


class ConsistencyEnforcement(_Section):
    """Whether a mismatch of numbers is an error (true) or a warning (false).

    The last step is always logged, evaluated and checkpointed, so the three settings about it never fail.
    """

    enforce_tokens_per_step_consistency: bool = Field(True, description="steps and tokens of the target agree")
    enforce_last_step_logged: bool = Field(True, description="for existing files; it always is")
    enforce_last_step_evaluated: bool = Field(True, description="for existing files; it always is")
    enforce_last_step_checkpointed: bool = Field(True, description="for existing files; it always is")
    enforce_enough_tokens_in_dataset: bool = Field(True, description="no token is seen twice")


class StepProfileSettings(_Section):
    """Shape of an optimizer step."""

    gradient_accumulation_steps: Positive = Field(description="micro-batches per step and rank")
    local_train_micro_batch_size: Positive = Field(description="samples per micro-batch and rank")
    sequence_length: Positive = Field(description="tokens per sample")
    dp_degree: Positive = Field(description="ranks that train on different data")


class TrainingTarget(_Section):
    """Where the run ends."""

    num_target_tokens: Positive = Field(description="tokens seen at the end, over all ranks")
    num_target_steps: Positive = Field(description="optimizer steps done at the end")


class TrainingProgressSettings(_Section):
    """Where the run starts; zeros for a fresh run. ``--resume`` takes the checkpoint's counters instead."""

    global_num_seen_tokens: Count = Field(0, description="tokens seen before, over all ranks")
    num_seen_steps: Count = Field(0, description="optimizer steps done before")
    num_seen_samples: Count = Field(0, description="samples seen before, over all ranks")
    last_step: int = Field(-1, strict=True, ge=-1, description="index of the last step done; -1 for none")


class WarmstartCheckpointPaths(_Section):
    """The checkpoint that a warm start loads."""

    checkpoint_folder_path: Path | None = Field(None, description="a DCP checkpoint")
    model_checkpoint_path: Path | None = Field(None, description="the model file of an FSDP1 checkpoint")
    optimizer_checkpoint_path: Path | None = Field(None, description="the optimizer file of an FSDP1 checkpoint")


class Settings(_Section):
    """Everything of a run that is no component."""

    experiment_id: Annotated[str, DefaultFrom("${modalities_env:experiment_id}")] = Field(
        min_length=1, description="name of the run and of its folder"
    )
    config_file_path: Annotated[Path, DefaultFrom("${modalities_env:config_file_path}")] = Field(
        description="the experiment's YAML file"
    )
    config_folder_path: Path | None = Field(None, description="folder of that file, for existing files")
    referencing_keys: ReferencingKeys = Field(description="names of the tensors on the way from the data to the loss")
    cuda_env: CudaEnv = Field(default_factory=CudaEnv, description="ranks as the launcher set them")
    paths: Paths = Field(default_factory=Paths, description="paths of the experiment; further names are free")
    intervals: IntervalSettings = Field(description="how often something is done")
    consistency_enforcement: ConsistencyEnforcement = Field(
        default_factory=ConsistencyEnforcement, description="which mismatches of numbers are errors"
    )
    step_profile: StepProfileSettings = Field(description="shape of an optimizer step")
    training_target: TrainingTarget = Field(description="where the run ends")
    training_progress: TrainingProgressSettings = Field(
        default_factory=TrainingProgressSettings, description="where the run starts"
    )
    warmstart_checkpoint_paths: WarmstartCheckpointPaths | None = Field(
        None, description="the checkpoint that a warm start loads"
    )
    debugging: Instance[DebuggingSettings] | None = Field(None, description="hooks and determinism")
    seed: Count = Field(42, lt=2**62, description="of dropout, and of weights where the model names no seed")
    deterministic: bool = Field(
        False, description="take deterministic algorithms only, and keep digests of the weights at every logged step"
    )
    autocast: EnumField[Autocast] = Field(
        Autocast.NONE, description="precision of unwrapped models; auto takes bf16 where the processor is fast in it"
    )


class TrainingRecipe(BaseModel):
    """The slots of a training run, in the order in which they are built."""

    model_config = ConfigDict(defer_build=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    rules: ClassVar[tuple[Rule, ...]] = TRAINING_RULES
    shared: ClassVar[dict[str, Any]] = {
        "model": Instance[Model],
        "optimizer": Instance[Optimizer],
        "lr_scheduler": Instance[LRScheduler],
        "collate_fn": Instance[CollateFn],
        "tokenizer": Instance[Tokenizer],
    }
    """Entries with a kind of their own that others find by name; built if something refers to them."""
    shorthands: ClassVar[dict[str, str]] = {"model": "app_state.model"}
    """What an override may call by a name that the config does not have."""

    settings: Settings = Field(description="everything that is no component")
    train_dataset: Instance[Dataset] = Field(description="what the model learns from")
    train_dataloader: Instance[DataLoader] = Field(description="its batches")
    eval_dataloaders: list[Instance[DataLoader]] = Field(
        default_factory=list, description="batches of the data that the model is evaluated on"
    )
    loss_fn: Instance[Loss] = Field(description="what is minimised")
    device_mesh: Instance[DeviceMesh] | None = Field(None, description="layout of the ranks")
    model_raw: Instance[Model] | None = Field(None, description="the model before it is wrapped")
    app_state: Instance[AppState] = Field(description="model, optimizer and scheduler: what a checkpoint holds")
    gradient_clipper: Instance[GradientClipper] | None = Field(
        None, description="measures and clips gradients; without one they are only measured"
    )
    checkpoint_saving: Instance[CheckpointSaving] = Field(description="which checkpoints are written, and how")
    checkpoint_loading: Annotated[
        Instance[CheckpointLoading] | None,
        DefaultFrom("checkpoint_saving.checkpoint_saving_execution.variant_key", "checkpoint_saving.variant_key"),
    ] = Field(None, description="how --resume reads them; by default as they are written")
    mfu_calculator: Instance[MFUCalculator] | None = Field(None, description="model FLOPs utilisation")
    profiler: Instance[Profiler] | None = Field(None, description="records what steps do")
    scheduled_pipeline: Instance[Pipeline] | None = Field(None, description="stages of the model and their schedule")
    progress_subscriber: Instance[ProgressSubscriber] | None = Field(None, description="shows how far the run is")
    evaluation_subscriber: Instance[ResultsSubscriber] | None = Field(None, description="where figures go")


class ProfilingSettings(BaseModel):
    """Numbers that the components of a profiling config refer to; all names are free."""

    model_config = ConfigDict(defer_build=True, extra="allow")


class ProfilingRecipe(BaseModel):
    """The slots of a config that profiles one component without training."""

    model_config = ConfigDict(defer_build=True, extra="forbid", arbitrary_types_allowed=True)

    settings: ProfilingSettings = Field(default_factory=ProfilingSettings, description="free names")
    steppable_component: Instance[SteppableComponent] = Field(description="what is profiled")
    profiler: Instance[Profiler] = Field(description="what is recorded")
