"""Door sign of ``training/``: losses, clipping, MFU, and numbers that follow from others."""

from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, Field

from modalities.parallel.settings import ParallelismDegrees
from modalities.registry import places
from modalities.registry.fields import ComponentConfig, DefaultFrom, EnumField, ExistingFile, ExistingPath, Instance
from modalities.registry.interfaces import (
    DeviceMesh,
    FSDP1Model,
    GradientClipper,
    IntValue,
    Loss,
    MFUCalculator,
    Model,
)
from modalities.registry.spec import Rename, Sign
from modalities.training.settings import GradientClippingMode

sign = Sign()

_CLIPPING = "modalities.training.gradient_clipping"
_NUMBERS = "modalities.training.number_conversion"


@sign.component(
    "loss", "clm_cross_entropy_loss", builds="modalities.training.losses:CLMCrossEntropyLoss", provides=Loss
)
class CLMCrossEntropyLossConfig(ComponentConfig):
    """Cross-entropy of the next token."""

    target_key: Annotated[str, places.TARGET_KEY] = Field(description="name of the targets")
    prediction_key: Annotated[str, places.PREDICTION_KEY] = Field(description="name of the predictions")


class _FSDP1ClippingConfig(ComponentConfig):
    wrapped_model: Annotated[Instance[FSDP1Model], places.TRAINED_MODEL] = Field(
        description="the model wrapped with FSDP1"
    )
    norm_type: EnumField[GradientClippingMode] = Field(description="P1_NORM, P2_NORM or MAX_NORM")


@sign.component("gradient_clipper", "fsdp1", builds=f"{_CLIPPING}:FSDP1GradientClipper", provides=GradientClipper)
class FSDP1GradientClipperConfig(_FSDP1ClippingConfig):
    """Clips the gradients of an FSDP1 model by their global norm."""

    max_norm: float = Field(gt=0, description="gradients are scaled down to this norm")


@sign.component(
    "gradient_clipper", "fsdp1_logging_only", builds=f"{_CLIPPING}:FSDP1GradientClipper", provides=GradientClipper
)
class FSDP1LoggingOnlyConfig(_FSDP1ClippingConfig):
    """Measures the gradient norm of an FSDP1 model."""


class _FSDP2ClippingConfig(ComponentConfig):
    model_parts: Annotated[Instance[Model] | list[Instance[Model]], places.TRAINED_MODEL] = Field(
        validation_alias=AliasChoices("wrapped_model", "model_parts"), description="the model, or its parts"
    )
    norm_type: EnumField[GradientClippingMode] = Field(description="P1_NORM, P2_NORM or MAX_NORM")
    device_mesh: Annotated[Instance[DeviceMesh] | None, places.DEVICE_MESH] = Field(
        None, description="the mesh the model is sharded over"
    )


@sign.component("gradient_clipper", "fsdp2", builds=f"{_CLIPPING}:FSDP2GradientClipper", provides=GradientClipper)
class FSDP2GradientClipperConfig(_FSDP2ClippingConfig):
    """Clips the gradients of an FSDP2 or unsharded model by their global norm."""

    max_norm: float = Field(gt=0, description="gradients are scaled down to this norm")


@sign.component(
    "gradient_clipper", "fsdp2_logging_only", builds=f"{_CLIPPING}:FSDP2GradientClipper", provides=GradientClipper
)
class FSDP2LoggingOnlyConfig(_FSDP2ClippingConfig):
    """Measures the gradient norm of an FSDP2 or unsharded model."""


@sign.component("mfu_calculator", "gpt2", builds="modalities.training.mfu:GPT2MFUCalculator", provides=MFUCalculator)
class GPT2MFUCalculatorConfig(ComponentConfig):
    """Model FLOPs utilisation of a GPT."""

    n_layer: Annotated[int, DefaultFrom("model_raw.n_layer")] = Field(strict=True, gt=0, description="number of blocks")
    sequence_length: Annotated[int, places.SEQUENCE_LENGTH] = Field(strict=True, gt=0, description="tokens per sample")
    n_embd: Annotated[int, DefaultFrom("model_raw.n_embd")] = Field(strict=True, gt=0, description="width")
    world_size: Annotated[int, places.WORLD_SIZE] = Field(strict=True, gt=0, description="number of ranks")
    model_parts: Annotated[Instance[Model] | list[Instance[Model]], places.TRAINED_MODEL] = Field(
        validation_alias=AliasChoices("wrapped_model", "model_parts"), description="the model, or its parts"
    )
    device_mesh: Annotated[Instance[DeviceMesh] | None, places.DEVICE_MESH] = Field(
        None, description="the mesh the model is sharded over"
    )


@sign.component(
    "number_conversion", "parallel_degree", builds="modalities.parallel.mesh:parallel_degree", provides=IntValue
)
class ParallelDegreeConfig(ComponentConfig):
    """Number of ranks along axes of the device mesh."""

    device_mesh: Annotated[Instance[DeviceMesh], places.DEVICE_MESH] = Field(description="the mesh")
    parallelism_methods: list[EnumField[ParallelismDegrees]] = Field(description="axes whose sizes are multiplied")


_RANKS = Field(strict=True, gt=0, description="ranks that train on different data")
_MICRO_BATCH = Field(strict=True, gt=0, description="samples per micro-batch and rank")
_SEQUENCE = Field(strict=True, gt=0, description="tokens per sample")
_ACCUMULATION = Field(strict=True, gt=0, description="micro-batches per step and rank")


@sign.component(
    "number_conversion",
    "local_num_batches_from_num_samples",
    builds=f"{_NUMBERS}:local_num_batches_from_num_samples",
    provides=IntValue,
)
class LocalNumBatchesFromNumSamplesConfig(ComponentConfig):
    """Micro-batches per rank from samples."""

    num_ranks: Annotated[int, places.DP_DEGREE] = _RANKS
    global_num_samples: int = Field(strict=True, ge=0, description="samples over all ranks")
    local_micro_batch_size: Annotated[int, places.MICRO_BATCH_SIZE] = _MICRO_BATCH


@sign.component(
    "number_conversion",
    "local_num_batches_from_num_tokens",
    builds=f"{_NUMBERS}:local_num_batches_from_num_tokens",
    provides=IntValue,
)
class LocalNumBatchesFromNumTokensConfig(ComponentConfig):
    """Micro-batches per rank from tokens."""

    num_ranks: Annotated[int, places.DP_DEGREE] = _RANKS
    global_num_tokens: int = Field(strict=True, ge=0, description="tokens over all ranks")
    sequence_length: Annotated[int, places.SEQUENCE_LENGTH] = _SEQUENCE
    local_micro_batch_size: Annotated[int, places.MICRO_BATCH_SIZE] = _MICRO_BATCH


@sign.component(
    "number_conversion",
    "num_samples_from_num_tokens",
    builds=f"{_NUMBERS}:num_samples_from_num_tokens",
    provides=IntValue,
)
class NumSamplesFromNumTokensConfig(ComponentConfig):
    """Samples from tokens."""

    num_tokens: int = Field(strict=True, ge=0, description="tokens")
    sequence_length: Annotated[int, places.SEQUENCE_LENGTH] = _SEQUENCE


@sign.component(
    "number_conversion",
    "num_steps_from_num_samples",
    builds=f"{_NUMBERS}:num_steps_from_num_samples",
    provides=IntValue,
    renamed={"dp_degree": Rename("num_ranks")},
)
class NumStepsFromNumSamplesConfig(ComponentConfig):
    """Optimizer steps from samples."""

    num_ranks: Annotated[int, places.DP_DEGREE] = _RANKS
    local_micro_batch_size: Annotated[int, places.MICRO_BATCH_SIZE] = _MICRO_BATCH
    global_num_samples: int = Field(strict=True, ge=0, description="samples over all ranks")
    gradient_accumulation_steps: Annotated[int, places.ACCUMULATION_STEPS] = _ACCUMULATION


@sign.component(
    "number_conversion",
    "num_steps_from_num_tokens",
    builds=f"{_NUMBERS}:num_steps_from_num_tokens",
    provides=IntValue,
)
class NumStepsFromNumTokensConfig(ComponentConfig):
    """Optimizer steps from tokens."""

    dp_degree: Annotated[int, places.DP_DEGREE] = _RANKS
    local_micro_batch_size: Annotated[int, places.MICRO_BATCH_SIZE] = _MICRO_BATCH
    global_num_tokens: int = Field(strict=True, ge=0, description="tokens over all ranks")
    sequence_length: Annotated[int, places.SEQUENCE_LENGTH] = _SEQUENCE
    gradient_accumulation_steps: Annotated[int, places.ACCUMULATION_STEPS] = _ACCUMULATION


@sign.component(
    "number_conversion",
    "num_tokens_from_num_steps",
    builds=f"{_NUMBERS}:num_tokens_from_num_steps",
    provides=IntValue,
)
class NumTokensFromNumStepsConfig(ComponentConfig):
    """Tokens from optimizer steps."""

    num_steps: Annotated[int, places.NUM_TARGET_STEPS] = Field(strict=True, ge=0, description="optimizer steps")
    dp_degree: Annotated[int, places.DP_DEGREE] = _RANKS
    local_micro_batch_size: Annotated[int, places.MICRO_BATCH_SIZE] = _MICRO_BATCH
    sequence_length: Annotated[int, places.SEQUENCE_LENGTH] = _SEQUENCE
    gradient_accumulation_steps: Annotated[int, places.ACCUMULATION_STEPS] = _ACCUMULATION


@sign.component(
    "number_conversion",
    "local_micro_batch_size_from_global_batch_size",
    builds=f"{_NUMBERS}:local_micro_batch_size_from_global_batch_size",
    provides=IntValue,
)
class LocalMicroBatchSizeConfig(ComponentConfig):
    """Samples per rank and micro-batch that make the same global batch in any world."""

    global_num_samples_per_step: int = Field(strict=True, gt=0, description="samples per step over all ranks")
    dp_degree: Annotated[int, places.DP_DEGREE] = _RANKS
    gradient_accumulation_steps: Annotated[int, places.ACCUMULATION_STEPS] = _ACCUMULATION


class _FromCheckpointPathConfig(ComponentConfig):
    checkpoint_path: Path = Field(description="a checkpoint's folder or file; only its name is read")


@sign.component(
    "number_conversion",
    "last_step_from_checkpoint_path",
    builds=f"{_NUMBERS}:last_step_from_checkpoint_path",
    provides=IntValue,
)
class LastStepFromCheckpointPathConfig(_FromCheckpointPathConfig):
    """Index of the last step done, from a checkpoint's name."""


@sign.component(
    "number_conversion",
    "num_seen_steps_from_checkpoint_path",
    builds=f"{_NUMBERS}:num_seen_steps_from_checkpoint_path",
    provides=IntValue,
)
class NumSeenStepsFromCheckpointPathConfig(_FromCheckpointPathConfig):
    """Steps done, from a checkpoint's name."""


@sign.component(
    "number_conversion",
    "global_num_seen_tokens_from_checkpoint_path",
    builds=f"{_NUMBERS}:global_num_seen_tokens_from_checkpoint_path",
    provides=IntValue,
)
class NumSeenTokensFromCheckpointPathConfig(_FromCheckpointPathConfig):
    """Tokens seen, from a checkpoint's name."""


@sign.component(
    "number_conversion",
    "num_target_steps_from_checkpoint_path",
    builds=f"{_NUMBERS}:num_target_steps_from_checkpoint_path",
    provides=IntValue,
)
class NumTargetStepsFromCheckpointPathConfig(_FromCheckpointPathConfig):
    """Target in steps, from a checkpoint's name."""


@sign.component(
    "number_conversion",
    "global_num_target_tokens_from_checkpoint_path",
    builds=f"{_NUMBERS}:global_num_target_tokens_from_checkpoint_path",
    provides=IntValue,
)
class NumTargetTokensFromCheckpointPathConfig(_FromCheckpointPathConfig):
    """Target in tokens, from a checkpoint's name."""


@sign.component(
    "number_conversion",
    "num_tokens_from_packed_mem_map_dataset_continuous",
    builds=f"{_NUMBERS}:num_tokens_from_packed_mem_map_dataset_continuous",
    provides=IntValue,
)
class NumTokensFromPackedDatasetConfig(ComponentConfig):
    """Tokens of one pass over a packed file, in whole steps."""

    dataset_path: ExistingFile = Field(description="the packed file")
    sequence_length: Annotated[int, places.SEQUENCE_LENGTH] = _SEQUENCE
    dp_degree: Annotated[int, places.DP_DEGREE] = _RANKS
    local_micro_batch_size: Annotated[int, places.MICRO_BATCH_SIZE] = _MICRO_BATCH
    gradient_accumulation_steps: Annotated[int, places.ACCUMULATION_STEPS] = _ACCUMULATION
    sample_key: str = Field("text", description="name of the samples")
    reuse_last_target: bool = Field(True, description="whether a block's last target is the next one's first input")


@sign.component(
    "number_conversion",
    "num_steps_from_raw_dataset_index",
    builds=f"{_NUMBERS}:num_steps_from_raw_dataset_index",
    provides=IntValue,
    renamed={"dp_degree": Rename("num_ranks")},
)
class NumStepsFromRawDatasetIndexConfig(ComponentConfig):
    """Optimizer steps of one pass over a raw dataset."""

    raw_index_path: ExistingPath = Field(description="the index of the raw dataset")
    num_ranks: Annotated[int, places.DP_DEGREE] = _RANKS
    local_micro_batch_size: Annotated[int, places.MICRO_BATCH_SIZE] = _MICRO_BATCH
    gradient_accumulation_steps: Annotated[int, places.ACCUMULATION_STEPS] = _ACCUMULATION
