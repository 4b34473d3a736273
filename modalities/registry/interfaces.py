"""What components provide and need, as stand-ins that import nothing.

A stand-in names the runtime type it stands for. Subclassing mirrors the runtime hierarchy, so that "needs a model
sharded by FSDP2" is checked from the config alone, before torch is imported. When the components are built, the real
``isinstance`` check runs.
"""

from __future__ import annotations

from typing import ClassVar


class Interface:
    """Base of all stand-ins; ``runtime`` is the type that it stands for, or ``"module:name"`` of it."""

    runtime: ClassVar[str | type | None] = None


class Anything(Interface):
    """Provided by components whose type is known only once they are built."""


class IntValue(Interface):
    """A whole number that a component computes, such as a number of steps."""

    runtime = "builtins:int"


class Model(Interface):
    runtime = "torch.nn:Module"


class FSDP1Model(Model):
    runtime = "torch.distributed.fsdp:FullyShardedDataParallel"


class ModelInitialization(Interface):
    runtime = "modalities.models.initialization:ModelInitializationIF"


class DeviceMesh(Interface):
    runtime = "torch.distributed.device_mesh:DeviceMesh"


class Optimizer(Interface):
    runtime = "torch.optim:Optimizer"


class LRScheduler(Interface):
    runtime = "torch.optim.lr_scheduler:LRScheduler"


class Loss(Interface):
    runtime = "modalities.training.losses:Loss"


class AppState(Interface):
    runtime = "modalities.checkpointing.app_state:AppState"


class GradientClipper(Interface):
    runtime = "modalities.training.gradient_clipping:GradientClipperIF"


class Tokenizer(Interface):
    runtime = "modalities.data.tokenizers:TokenizerWrapper"


class Packing(Interface):
    runtime = "modalities.data.packing:Packing"


class Dataset(Interface):
    runtime = "torch.utils.data:Dataset"


class Sampler(Interface):
    runtime = "torch.utils.data:Sampler"


class BatchSampler(Sampler):
    runtime = "torch.utils.data:BatchSampler"


class CollateFn(Interface):
    runtime = "modalities.data.collators:CollateFnIF"


class DataLoader(Interface):
    runtime = "modalities.data.dataloader:LLMDataLoader"


class CheckpointSaving(Interface):
    runtime = "modalities.checkpointing.checkpoint_saving:CheckpointSaving"


class CheckpointSavingStrategy(Interface):
    runtime = "modalities.checkpointing.retention:CheckpointSavingStrategyIF"


class CheckpointSavingExecution(Interface):
    runtime = "modalities.checkpointing.interfaces:CheckpointSavingExecutionABC"


class CheckpointLoading(Interface):
    """Any way of loading a checkpoint."""


class DistributedCheckpointLoading(CheckpointLoading):
    runtime = "modalities.checkpointing.interfaces:DistributedCheckpointLoadingIF"


class FSDP1CheckpointLoading(CheckpointLoading):
    runtime = "modalities.checkpointing.interfaces:FSDP1CheckpointLoadingIF"


class TorchCheckpointLoading(CheckpointLoading):
    runtime = "modalities.checkpointing.torch_checkpoint_loading:TorchCheckpointLoading"


class ProgressSubscriber(Interface):
    runtime = "modalities.tracking.subscribers:ProgressSubscriberIF"


class ResultsSubscriber(Interface):
    runtime = "modalities.tracking.subscribers:ResultsSubscriberIF"


class MFUCalculator(Interface):
    runtime = "modalities.training.mfu:MFUCalculatorIF"


class Profiler(Interface):
    """Records what the steps of a run do."""


class SteppableComponent(Interface):
    """Something whose steps a profiler records, without a training run."""


class DatasetBatchGenerator(Interface):
    """Makes batches out of nothing, to be profiled."""


class Pipeline(Interface):
    """A model cut into stages, with the schedule of their steps."""


class PipelineStage(Interface):
    """One stage of a pipeline."""


class StagesGenerator(Interface):
    """Says which layers make a stage."""


class DebuggingSettings(Interface):
    """Hooks and determinism of a run under examination."""


class DebuggingHook(Interface):
    """Hooks that look at what modules compute."""


class InferenceComponent(Interface):
    """A model that answers prompts."""
