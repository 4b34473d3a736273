"""Names of sharding strategies and precisions, as a config spells them."""

from __future__ import annotations

from enum import Enum


class ShardingStrategy(Enum):
    """How FSDP1 shards; same names and numbers as ``torch.distributed.fsdp.ShardingStrategy``'s members."""

    FULL_SHARD = "1"
    SHARD_GRAD_OP = "2"
    NO_SHARD = "3"
    HYBRID_SHARD = "4"
    _HYBRID_SHARD_ZERO2 = "5"


class MixedPrecisionSettings(Enum):
    """Precision of parameters, gradient reduction and buffers under FSDP1."""

    FP_16 = "FP_16"
    BF_16 = "BF_16"
    BF_16_WORKING = "BF_16_WORKING"
    FP_32 = "FP_32"
    MIXED_PRECISION_MEGATRON = "MIXED_PRECISION_MEGATRON"
    NO_MIXED_PRECISION = "NO_MIXED_PRECISION"


class PyTorchDtypes(Enum):
    """A floating-point type."""

    FP_16 = "float16"
    FP_32 = "float32"
    BF_16 = "bfloat16"


class ParallelismDegrees(Enum):
    """Axes of the device mesh."""

    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    CP = "cp"
    TP = "tp"
    PP = "pp"


class PipelineSelectionTypes(Enum):
    """Parts of a pipeline."""

    PP_STAGE = "PP_STAGE"
    MODEL_PART = "MODEL_PART"
    PP_SCHEDULE = "PP_SCHEDULE"
