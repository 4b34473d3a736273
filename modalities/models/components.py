"""Door sign of ``models/``: models, their initialisation and compilation, and norms."""

from typing import Annotated

from pydantic import Field

from modalities.models.renames import norm_settings
from modalities.models.rules import COMPOSED_INITIALIZATION_RULES, GPT2_RULES
from modalities.models.settings import (
    ActivationType,
    AttentionConfig,
    AttentionImplementation,
    LayerNormFields,
    LayerNormWrapperConfig,
    PositionTypes,
    PytorchRMSLayerNormFields,
    RMSLayerNormFields,
    SupportWeightInitModels,
    WeightInitTypes,
)
from modalities.registry import places
from modalities.registry.fields import ComponentConfig, DefaultFrom, EnumField, Instance, NamesOf
from modalities.registry.interfaces import Model, ModelInitialization
from modalities.registry.spec import Rename, SameAs, Sign

sign = Sign()

sign.renamed_variant("model", "fsdp_wrapped", "fsdp1_wrapped")
sign.renamed_variant("model", "fsdp", "fsdp1_wrapped")


GPT2_MODULES = (
    "GPT2LLM",
    "GPT2Block",
    "CausalSelfAttention",
    "SwiGLU",
    "GELUFeedForward",
    "RotaryTransform",
    "IdentityTransform",
    "RMSLayerNorm",
    "LayerNorm",
    "RMSNorm",
    "Linear",
    "Embedding",
    "ModuleDict",
    "ModuleList",
    "Dropout",
)


@sign.component(
    "model",
    "gpt2",
    builds="modalities.models.gpt2:GPT2LLM",
    provides=Model,
    names={"modules": GPT2_MODULES, "weight_decay_groups": ("linear", "embedding", "layernorm")},
    renamed={
        "attention_norm": Rename("attention_norm_config", norm_settings),
        "ffn_norm": Rename("ffn_norm_config", norm_settings),
        "lm_head_norm": Rename("lm_head_norm_config", norm_settings),
    },
)
class GPT2LLMConfig(ComponentConfig):
    """A decoder-only transformer: GPT-2 with rotary positions, grouped queries, SwiGLU and RMS norm to choose from."""

    sample_key: Annotated[str, places.SAMPLE_KEY] = Field(description="key of the token ids in a batch")
    prediction_key: Annotated[str, places.PREDICTION_KEY] = Field(description="key of the logits in the output")
    use_meta_device: bool | None = Field(False, description="make the parameters without memory, for model_initialized")
    poe_type: EnumField[PositionTypes] = Field(description="learned absolute positions, or none")
    sequence_length: Annotated[int, places.SEQUENCE_LENGTH] = Field(ge=1, description="longest sequence, in tokens")
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

    rules = GPT2_RULES


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
    block_names: Annotated[list[str], NamesOf("modules", of="model")] = Field(
        min_length=1, description="class names of the layers that are compiled"
    )
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
    hidden_dim: Annotated[int | None, DefaultFrom("model_raw.n_embd")] = Field(
        None, gt=0, description="width of the model, for std: auto"
    )
    num_layers: Annotated[int | None, DefaultFrom("model_raw.n_layer")] = Field(
        None, gt=0, description="number of blocks, for scaled and scaled_embed"
    )

    rules = COMPOSED_INITIALIZATION_RULES


@sign.component(
    "model_initialization",
    "gpt2_llama3_like",
    builds="modalities.models.initialization:make_llama3_like_initialization",
    provides=ModelInitialization,
)
class Llama3LikeInitializationConfig(ComponentConfig):
    """Truncated normal weights that shrink with depth, as Llama 3 in torchtitan; for models without biases."""

    num_layers: Annotated[int, DefaultFrom("model_raw.n_layer")] = Field(gt=0, description="number of blocks")
    n_embd: Annotated[int, DefaultFrom("model_raw.n_embd")] = Field(gt=0, description="width of the model")
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
