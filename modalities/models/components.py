"""Door sign of ``models/``: models, their initialisation and compilation, and norms."""

from __future__ import annotations

from pydantic import Field, model_validator

from modalities.models.settings import (
    ActivationType,
    AttentionConfig,
    AttentionImplementation,
    LayerNormFields,
    LayerNormWrapperConfig,
    PositionTypes,
    PytorchRMSLayerNormFields,
    RMSLayerNormFields,
    RMSLayerNormWrapper,
    RotaryTransformWrapper,
    SupportWeightInitModels,
    WeightInitTypes,
)
from modalities.registry.fields import ComponentConfig, EnumField, Instance
from modalities.registry.interfaces import Model, ModelInitialization
from modalities.registry.registry import SameAs, Sign

sign = Sign()


@sign.component("model", "gpt2", builds="modalities.models.gpt2:GPT2LLM", provides=Model)
class GPT2LLMConfig(ComponentConfig):
    """A decoder-only transformer: GPT-2 with rotary positions, grouped queries, SwiGLU and RMS norm to choose from."""

    sample_key: str = Field(description="key of the token ids in a batch")
    prediction_key: str = Field(description="key of the logits in the output")
    use_meta_device: bool | None = Field(False, description="make the parameters without memory, for model_initialized")
    poe_type: EnumField[PositionTypes] = Field(description="learned absolute positions, or none")
    sequence_length: int = Field(ge=1, description="longest sequence, in tokens")
    vocab_size: int = Field(ge=1, description="number of token ids")
    n_layer: int = Field(ge=1, description="number of blocks")
    n_head_q: int = Field(ge=1, description="number of query heads")
    n_head_kv: int = Field(ge=1, description="number of key-value heads, each shared by n_head_q / n_head_kv queries")
    n_embd: int = Field(ge=1, description="width of the model")
    ffn_hidden: int = Field(ge=1, description="hidden width of the feed-forward layer; SwiGLU takes two thirds of it")
    dropout: float = Field(ge=0, le=1, description="probability of dropping an activation")
    bias: bool = Field(description="biases in the linear layers")
    attention_config: AttentionConfig = Field(description="transforms and norms of queries and keys")
    attention_implementation: EnumField[AttentionImplementation] = Field(description="who computes attention")
    activation_type: EnumField[ActivationType] = Field(description="nonlinearity of the feed-forward layer")
    attention_norm_config: LayerNormWrapperConfig = Field(description="norm before attention")
    ffn_norm_config: LayerNormWrapperConfig = Field(description="norm before the feed-forward layer")
    lm_head_norm_config: LayerNormWrapperConfig = Field(description="norm before the head")
    use_weight_tying: bool = Field(description="the head shares the embedding's weights")
    seed: int | None = Field(None, ge=0, lt=2**62, description="seed of the weights; by default torch's")
    enforce_swiglu_hidden_dim_multiple_of: int = Field(
        256, ge=1, description="SwiGLU's hidden width is rounded up to a multiple of it"
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> GPT2LLMConfig:
        if self.n_embd % self.n_head_q:
            raise ValueError(f"n_embd {self.n_embd} is not divisible by n_head_q {self.n_head_q}")
        if self.n_head_q % self.n_head_kv:
            raise ValueError(f"n_head_q {self.n_head_q} is not divisible by n_head_kv {self.n_head_kv}")
        for name in ("attention_norm_config", "ffn_norm_config", "lm_head_norm_config"):
            if (size := _norm_size(getattr(self, name))) != self.n_embd:
                raise ValueError(f"{name} is for {size} values, but n_embd is {self.n_embd}")
        self._check_heads()
        return self

    def _check_heads(self) -> None:
        head_width = self.n_embd // self.n_head_q
        norm = self.attention_config.qk_norm_config
        if norm is not None and _norm_size(norm) != head_width:
            raise ValueError(
                f"attention_config: qk_norm_config is for {_norm_size(norm)} values, but a head has "
                f"n_embd {self.n_embd} / n_head_q {self.n_head_q} = {head_width}"
            )
        for transform in self.attention_config.qkv_transforms:
            if not isinstance(transform, RotaryTransformWrapper):
                continue
            rotary = transform.config
            if (rotary.n_embd, rotary.n_head) != (self.n_embd, self.n_head_q):
                raise ValueError(
                    f"attention_config: RotaryTransform has n_embd {rotary.n_embd} and n_head {rotary.n_head}, "
                    f"but the model has n_embd {self.n_embd} and n_head_q {self.n_head_q}"
                )
            if head_width % 2:
                raise ValueError(
                    f"attention_config: RotaryTransform needs heads of an even width, but n_embd {self.n_embd} / "
                    f"n_head_q {self.n_head_q} = {head_width}"
                )
            if rotary.seq_length_dim not in (-2, 2):
                raise ValueError(f"attention_config: seq_length_dim is {rotary.seq_length_dim}; this model needs -2")


def _norm_size(norm: LayerNormWrapperConfig) -> int:
    return norm.config.ndim if isinstance(norm, RMSLayerNormWrapper) else norm.config.normalized_shape


@sign.component(
    "model",
    "model_initialized",
    builds="modalities.models.initialization:initialize_model",
    provides=SameAs("model"),
)
class ModelInitializedConfig(ComponentConfig):
    """A model given memory where it has none, and fresh weights, the same for any number of ranks."""

    model: Instance[Model] | list[Instance[Model]] = Field(description="the model, sharded or not")
    model_initializer: Instance[ModelInitialization] = Field(description="how weights are drawn")


@sign.component("model", "compiled", builds="modalities.models.compilation:compile_blocks", provides=SameAs("model"))
class CompiledModelConfig(ComponentConfig):
    """A model whose blocks run through torch.compile."""

    model: Instance[Model] | list[Instance[Model]] = Field(description="the model")
    block_names: list[str] = Field(min_length=1, description="class names of the layers that are compiled")
    fullgraph: bool | None = Field(True, description="refuse code that torch.compile cannot take as a whole")
    debug: bool | None = Field(False, description="have the compiler write down what it does")


@sign.component(
    "model_initialization",
    "composed",
    builds="modalities.models.initialization:make_composed_initialization",
    provides=ModelInitialization,
)
class ComposedInitializationConfig(ComponentConfig):
    """Normal weights and zero biases, with smaller residual projections and larger embeddings on demand."""

    model_type: EnumField[SupportWeightInitModels] = Field(description="whose parameter names are meant")
    weight_init_type: EnumField[WeightInitTypes] = Field(description="plain, scaled, or scaled_embed")
    mean: float = Field(description="mean of the weights")
    std: float | str = Field(description="standard deviation of the weights, or auto: sqrt(2 / (5 * hidden_dim))")
    hidden_dim: int | None = Field(None, gt=0, description="width of the model, for std: auto")
    num_layers: int | None = Field(None, gt=0, description="number of blocks, for scaled and scaled_embed")

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> ComposedInitializationConfig:
        if isinstance(self.std, str) and self.std != "auto":
            raise ValueError(f"std is {self.std}; it must be a number or auto")
        if isinstance(self.std, float) and self.std < 0:
            raise ValueError(f"std is {self.std}; it must not be negative")
        if self.std == "auto" and self.hidden_dim is None:
            raise ValueError("std auto needs hidden_dim, the width of the model")
        if self.weight_init_type is not WeightInitTypes.PLAIN and self.num_layers is None:
            raise ValueError(f"weight_init_type {self.weight_init_type.value} needs num_layers, the number of blocks")
        return self


@sign.component(
    "model_initialization",
    "gpt2_llama3_like",
    builds="modalities.models.initialization:make_llama3_like_initialization",
    provides=ModelInitialization,
)
class Llama3LikeInitializationConfig(ComponentConfig):
    """Truncated normal weights that shrink with depth, as Llama 3 in torchtitan; for models without biases."""

    num_layers: int = Field(gt=0, description="number of blocks")
    n_embd: int = Field(gt=0, description="width of the model")
    depth_init: bool = Field(True, description="shrink with each block's own depth, not with the number of blocks")


@sign.component("layer_norm", "rms_norm", builds="modalities.models.norms:RMSLayerNorm", provides=Model)
class RMSLayerNormConfig(ComponentConfig, RMSLayerNormFields):
    """Root-mean-square norm with an optional bias."""


@sign.component("layer_norm", "layer_norm", builds="modalities.models.norms:make_layer_norm", provides=Model)
class LayerNormConfig(ComponentConfig, LayerNormFields):
    """Layer norm: mean 0, variance 1."""


@sign.component(
    "layer_norm", "pytorch_rms_norm", builds="modalities.models.norms:make_pytorch_rms_norm", provides=Model
)
class PytorchRMSLayerNormConfig(ComponentConfig, PytorchRMSLayerNormFields):
    """Root-mean-square norm of torch, without bias."""
