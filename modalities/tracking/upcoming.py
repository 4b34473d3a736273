"""Door sign of what existing configs use of ``tracking/`` and this version does not have yet: fields are checked."""

from pathlib import Path

from pydantic import Field

from modalities.registry.fields import ComponentConfig, EnumField, Instance
from modalities.registry.interfaces import DatasetBatchGenerator, Loss, Model, Optimizer, Profiler, SteppableComponent
from modalities.registry.spec import Sign
from modalities.tracking.settings import ModalitiesProfilerActivity

sign = Sign()


class _SteppedProfilerConfig(ComponentConfig):
    num_wait_steps: int = Field(description="steps before anything is done")
    num_warmup_steps: int = Field(description="steps that are recorded and dropped")
    num_active_steps: int = Field(description="steps that are recorded")
    tracked_ranks: list[int] | None = Field(None, description="ranks that record; by default all")


@sign.component("steppable_profiler", "kernel_tracing", builds=None, provides=Profiler)
class KernelTracingConfig(_SteppedProfilerConfig):
    """Traces of operators and kernels."""

    profiler_activities: list[EnumField[ModalitiesProfilerActivity]] = Field(description="CPU, CUDA")
    profile_memory: bool = Field(description="record allocations")
    record_shapes: bool = Field(description="record the operators' shapes")
    with_flops: bool = Field(description="estimate operations")
    with_stack: bool = Field(description="record the Python stack")
    with_modules: bool = Field(description="record the modules")
    output_folder_path: Path = Field(description="folder for the traces")


@sign.component("steppable_profiler", "memory_tracing", builds=None, provides=Profiler)
class MemoryTracingConfig(_SteppedProfilerConfig):
    """Snapshots of the accelerator's memory."""

    memory_snapshot_folder_path: Path = Field(description="folder for the snapshots")


@sign.component("steppable_profiler", "no_profiler", builds=None, provides=Profiler)
class NoProfilerConfig(ComponentConfig):
    """Records nothing."""


@sign.component("steppable_profiler", "combined", builds=None, provides=Profiler)
class CombinedProfilerConfig(ComponentConfig):
    """Several profilers at once."""

    profilers: list[Instance[Profiler]] = Field(description="the profilers")


@sign.component("steppable_component", "forward_pass", builds=None, provides=SteppableComponent)
class ForwardPassConfig(ComponentConfig):
    """The forward pass of a model, with its backward pass if there is a loss and an optimizer."""

    model: Instance[Model] = Field(description="the model")
    dataset_batch_generator: Instance[DatasetBatchGenerator] = Field(description="makes the batches")
    loss_fn: Instance[Loss] | None = Field(None, description="what is minimised")
    optimizer: Instance[Optimizer] | None = Field(None, description="takes the step")
