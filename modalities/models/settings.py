"""Words and nested schemas of the model components; free of torch."""

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
    COCA = "coca"


class WeightInitTypes(Enum):
    """Schemes of the composed initialisation; each adds to the one before."""

    PLAIN = "plain"
    SCALED = "scaled"
    SCALED_EMBED = "scaled_embed"


class NestedConfig(BaseModel):
    """Base of schemas inside a component's fields: unknown fields are refused, numbers must be finite."""

    model_config = ConfigDict(defer_build=True, extra="forbid", allow_inf_nan=False)


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
    return kind if isinstance(kind, str) and kind in LayerNorms.__members__ else LayerNorms.layer_norm.value


def _transform_tag(value: Any) -> str:
    kind = _spelled(value, "type_hint")
    is_known = isinstance(kind, str) and kind in QueryKeyValueTransformType.__members__
    return kind if is_known else QueryKeyValueTransformType.RotaryTransform.value


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


class HuggingFaceModelTypes(Enum):
    """Classes of transformers that load a model."""

    AutoModelForCausalLM = "AutoModelForCausalLM"
    AutoModelForMaskedLM = "AutoModelForMaskedLM"


class ActivationCheckpointingVariants(Enum):
    """What is recomputed in the backward pass."""

    FULL_ACTIVATION_CHECKPOINTING = "full_activation_checkpointing"
    SELECTIVE_LAYER_ACTIVATION_CHECKPOINTING = "selective_layer_activation_checkpointing"
    SELECTIVE_OP_ACTIVATION_CHECKPOINTING = "selective_op_activation_checkpointing"


class FullACParams(NestedConfig):
    """Every layer is recomputed: no fields."""


class SelectiveLayerACParams(NestedConfig):
    """Some layers are recomputed."""

    ac_freq: int = Field(strict=True, ge=1, description="every that many layers, one is recomputed")


class SelectiveOpACParams(NestedConfig):
    """All but expensive operations are recomputed."""

    save_ops_keys: list[str] = Field(description="names of the operations whose results are kept")


class CoCaAttentionConfig(NestedConfig):
    """Attention of the image-and-caption model."""

    attention_engine_type: str = Field(description="who computes attention")


class VisionTransformerConfig(NestedConfig):
    """An image encoder (https://arxiv.org/abs/2010.11929)."""

    sample_key: str = Field(description="key of the images in a batch")
    prediction_key: str = Field(description="key of its output")
    img_size: tuple[int, int] | Annotated[int, Field(ge=1)] = Field(224, description="height and width in pixels")
    n_classes: Annotated[int, Field(ge=1)] | None = Field(
        1000, description="size of a classifier's head; null for none"
    )
    n_layer: int = Field(12, ge=1, description="number of blocks")
    attention_config: CoCaAttentionConfig | None = Field(None, description="attention")
    n_head: int = Field(8, ge=1, description="number of heads")
    n_embd: int = Field(768, ge=1, description="width")
    dropout: float = Field(0.0, ge=0, description="probability of dropping an activation")
    patch_size: int = Field(16, ge=1, description="side of a patch in pixels")
    patch_stride: int = Field(16, ge=1, description="pixels between two patches")
    n_img_channels: int = Field(3, ge=1, description="colours")
    add_cls_token: bool = Field(True, description="add a token that stands for the whole image")
    bias: bool = Field(True, description="biases in the linear layers")


class TextDecoderConfig(NestedConfig):
    """The text decoder of the image-and-caption model."""

    sample_key: str = Field(description="key of the token ids in a batch")
    prediction_key: str = Field(description="key of its output")
    block_size: int = Field(ge=1, description="longest sequence, in tokens")
    vocab_size: int = Field(ge=1, description="number of token ids")
    n_layer_text: int = Field(ge=1, description="blocks that see text only")
    n_layer_multimodal_text: int = Field(ge=1, description="blocks that see the image too")
    n_head: int = Field(ge=1, description="number of heads")
    n_embd: int = Field(ge=1, description="width")
    ffn_hidden: int = Field(ge=1, description="hidden width of the feed-forward layer")
    dropout: float = Field(ge=0, description="probability of dropping an activation")
    bias: bool = Field(description="biases in the linear layers")
    attention_config: CoCaAttentionConfig = Field(description="attention")
    activation: EnumField[ActivationType] = Field(description="nonlinearity of the feed-forward layer")
    epsilon: float = Field(ge=0, description="added to the variance in its norms")
