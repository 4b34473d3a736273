"""Words and nested schemas of the model components; free of torch."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from modalities.registry.fields import EnumField


class PositionTypes(Enum):
    """How the embedding tells positions apart: a learned table, or not at all (rotary transforms act elsewhere)."""

    ABSOLUTE = "ABSOLUTE"
    NOPE = "NOPE"


class AttentionImplementation(Enum):
    """Who computes attention: plain matrix products, torch's fused kernels, or the package flash-attn."""

    MANUAL = "manual"
    PYTORCH_FLASH = "pytorch_flash"
    DAO_FLASH = "dao_flash"


class ActivationType(Enum):
    """The feed-forward layer's nonlinearity."""

    GELU = "gelu"
    SWIGLU = "swiglu"


class LayerNorms(Enum):
    """Kinds of norm."""

    rms_norm = "rms_norm"
    layer_norm = "layer_norm"
    pytorch_rms_norm = "pytorch_rms_norm"


class QueryKeyValueTransformType(Enum):
    """What is done to queries and keys before attention."""

    IdentityTransform = "IdentityTransform"
    RotaryTransform = "RotaryTransform"


class SupportWeightInitModels(Enum):
    """Models whose parameters the composed initialisation knows by name."""

    GPT2 = "gpt2"


class WeightInitTypes(Enum):
    """Schemes of the composed initialisation; each adds to the one before."""

    PLAIN = "plain"
    SCALED = "scaled"
    SCALED_EMBED = "scaled_embed"


class NestedConfig(BaseModel):
    """Base of schemas inside a component's fields: unknown fields are refused, numbers must be finite."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class RMSLayerNormFields(NestedConfig):
    """Root-mean-square norm with an optional bias."""

    ndim: int = Field(ge=1, description="size of the normalised dimension")
    epsilon: float = Field(1e-6, gt=0, description="added to the mean square")
    bias: bool = Field(True, description="learn a shift beside the scale")


class LayerNormFields(NestedConfig):
    """Layer norm: mean 0, variance 1."""

    normalized_shape: int = Field(ge=1, description="size of the normalised dimension")
    eps: float = Field(1e-6, gt=0, description="added to the variance")
    elementwise_affine: bool = Field(True, description="learn a scale")
    bias: bool = Field(True, description="learn a shift beside the scale")


class PytorchRMSLayerNormFields(NestedConfig):
    """Root-mean-square norm of torch, without bias."""

    normalized_shape: int = Field(ge=1, description="size of the normalised dimension")
    eps: float = Field(1e-5, gt=0, description="added to the mean square")


class RMSLayerNormWrapper(NestedConfig):
    """``norm_type: rms_norm`` with its fields."""

    norm_type: EnumField[LayerNorms] = Field(description="kind of norm")
    config: RMSLayerNormFields = Field(description="fields of the norm")


class LayerNormWrapper(NestedConfig):
    """``norm_type: layer_norm`` with its fields."""

    norm_type: EnumField[LayerNorms] = Field(description="kind of norm")
    config: LayerNormFields = Field(description="fields of the norm")


class PytorchRMSLayerNormWrapper(NestedConfig):
    """``norm_type: pytorch_rms_norm`` with its fields."""

    norm_type: EnumField[LayerNorms] = Field(description="kind of norm")
    config: PytorchRMSLayerNormFields = Field(description="fields of the norm")


class RotaryTransformConfig(NestedConfig):
    """Rotary position embedding (https://arxiv.org/abs/2104.09864), each head split in two halves."""

    n_embd: int = Field(ge=1, description="width of the model")
    n_head: int = Field(ge=1, description="number of query heads")
    seq_length_dim: int = Field(description="dimension of the sequence in (batch, head, sequence, width): -2")
    base_freq: int = Field(gt=1, description="base of the geometric series of wavelengths")


class IdentityTransformConfig(NestedConfig):
    """No fields."""


class RotaryTransformWrapper(NestedConfig):
    """``type_hint: RotaryTransform`` with its fields."""

    type_hint: EnumField[QueryKeyValueTransformType] = Field(description="kind of transform")
    config: RotaryTransformConfig = Field(description="fields of the transform")


class IdentityTransformWrapper(NestedConfig):
    """``type_hint: IdentityTransform``, without fields."""

    type_hint: EnumField[QueryKeyValueTransformType] = Field(description="kind of transform")
    config: IdentityTransformConfig = Field(description="nothing")


def _spelled(value: Any, key: str) -> Any:
    kind = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
    return kind.value if isinstance(kind, Enum) else kind


def _norm_tag(value: Any) -> str:
    # an unknown kind takes any branch: its complaint about norm_type is the one to be read
    kind = _spelled(value, "norm_type")
    return kind if kind in LayerNorms.__members__ else LayerNorms.layer_norm.value


def _transform_tag(value: Any) -> str:
    kind = _spelled(value, "type_hint")
    return kind if kind in QueryKeyValueTransformType.__members__ else QueryKeyValueTransformType.RotaryTransform.value


LayerNormWrapperConfig = Annotated[
    Annotated[RMSLayerNormWrapper, Tag("rms_norm")]
    | Annotated[LayerNormWrapper, Tag("layer_norm")]
    | Annotated[PytorchRMSLayerNormWrapper, Tag("pytorch_rms_norm")],
    Discriminator(_norm_tag),
]
"""A norm: ``norm_type`` says which, and so which fields ``config`` has."""

QueryKeyValueTransformConfig = Annotated[
    Annotated[RotaryTransformWrapper, Tag("RotaryTransform")]
    | Annotated[IdentityTransformWrapper, Tag("IdentityTransform")],
    Discriminator(_transform_tag),
]
"""A transform of queries, keys and values: ``type_hint`` says which, and so which fields ``config`` has."""


class AttentionConfig(NestedConfig):
    """What happens to queries, keys and values before attention."""

    qkv_transforms: list[QueryKeyValueTransformConfig] = Field(description="applied in this order")
    qk_norm_config: LayerNormWrapperConfig | None = Field(
        None, description="norm of each head's queries and keys, after the transforms"
    )
