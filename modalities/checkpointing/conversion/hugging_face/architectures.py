"""The architectures of transformers that express models of ours, as data; transformers itself is not needed.

Read in the modelling code of transformers 5 (https://github.com/huggingface/transformers). All of them are decoders with
norms before attention and before the feed-forward layer and one before the head; their rotary embedding splits each
head in two halves, as ours does, so queries and keys need no permutation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from modalities.models.settings import ActivationType


class Positions(Enum):
    """How a model tells positions apart."""

    ROTARY = "rotary"
    LEARNED = "learned"
    NONE = "none"


class Role(Enum):
    """What a module is; it tells where biases are."""

    EMBEDDING = "embedding"
    LINEAR = "linear"
    NORM = "norm"


@dataclass(frozen=True)
class ModuleNames:
    """Where the weights of one module of theirs lie in our model.

    Args:
        theirs: Its name; ``{}`` stands for the number of the block.
        ours: Names of our modules; those of several are concatenated along the outputs, in this order.
        role: What it is.
        transposed: Whether the weight is stored as (inputs, outputs).
    """

    theirs: str
    ours: tuple[str, ...]
    role: Role
    transposed: bool = False


@dataclass(frozen=True)
class Architecture:
    """What an architecture can express, and how it spells it.

    Args:
        name: Of the class.
        model_type: In ``config.json``.
        positions: How it tells positions apart.
        has_rms_norm: Root-mean-square norms without shift; otherwise layer norms with a shift.
        activation: Of the feed-forward layer.
        modules: All that have weights, without those that only our fields bring about.
        keys: In ``config.json``, by our field or word.
        dropout_keys: In ``config.json``; all hold our ``dropout``.
        bias_keys: In ``config.json``; all tell whether linear layers have biases. Empty where there is no choice.
        always_has_bias: Whether linear layers have biases where there is no choice.
        has_grouped_queries: Whether key-value heads may be fewer than query heads.
        has_query_norm: Norms of queries and keys after the rotary embedding: must be there, or must not.
        ties_by_default: What holds where ``config.json`` does not say it.
        constants: In ``config.json``, with the value that makes it the same as our model.
        defaults: What holds where ``config.json`` does not say it, unless that is the constant.
    """

    name: str
    model_type: str
    positions: Positions
    has_rms_norm: bool
    activation: ActivationType
    modules: tuple[ModuleNames, ...]
    keys: Mapping[str, str]
    dropout_keys: tuple[str, ...] = ("attention_dropout",)
    bias_keys: tuple[str, ...] = ()
    always_has_bias: bool = False
    has_grouped_queries: bool = True
    has_query_norm: bool = False
    ties_by_default: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _layers_of_llama(*feed_forward: tuple[str, str]) -> tuple[ModuleNames, ...]:
    def norm(theirs: str, ours: str) -> ModuleNames:
        return ModuleNames(theirs, (ours,), Role.NORM)

    def linear(theirs: str, ours: str) -> ModuleNames:
        return ModuleNames(f"model.layers.{{}}.{theirs}", (f"transformer.h.{{}}.{ours}",), Role.LINEAR)

    return (
        ModuleNames("model.embed_tokens", ("transformer.wte",), Role.EMBEDDING),
        norm("model.layers.{}.input_layernorm", "transformer.h.{}.attention_norm"),
        linear("self_attn.q_proj", "attn.q_attn"),
        linear("self_attn.k_proj", "attn.k_attn"),
        linear("self_attn.v_proj", "attn.v_attn"),
        linear("self_attn.o_proj", "attn.c_proj"),
        norm("model.layers.{}.post_attention_layernorm", "transformer.h.{}.ffn_norm"),
        *(linear(f"mlp.{theirs}", f"mlp.{ours}") for theirs, ours in feed_forward),
        norm("model.norm", "transformer.lm_head_norm"),
        ModuleNames("lm_head", ("transformer.lm_head",), Role.EMBEDDING),
    )


_GATED = (("gate_proj", "W"), ("up_proj", "V"), ("down_proj", "W_2"))

_KEYS_OF_LLAMA = {
    "vocab_size": "vocab_size",
    "sequence_length": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head_q": "num_attention_heads",
    "n_head_kv": "num_key_value_heads",
    "n_embd": "hidden_size",
    "hidden width": "intermediate_size",
    "activation": "hidden_act",
    "epsilon": "rms_norm_eps",
}

_QUERY_NORMS = (
    ModuleNames("model.layers.{}.self_attn.query_layernorm", ("transformer.h.{}.attn.q_norm",), Role.NORM),
    ModuleNames("model.layers.{}.self_attn.key_layernorm", ("transformer.h.{}.attn.k_norm",), Role.NORM),
)

_BIAS_OF_LLAMA = ("attention_bias", "mlp_bias")

LLAMA = Architecture(
    "LlamaForCausalLM",
    "llama",
    Positions.ROTARY,
    has_rms_norm=True,
    activation=ActivationType.SWIGLU,
    modules=_layers_of_llama(*_GATED),
    keys=_KEYS_OF_LLAMA | {"head width": "head_dim"},
    bias_keys=_BIAS_OF_LLAMA,
    constants={"pretraining_tp": 1},
)

ARCEE = Architecture(
    "ArceeForCausalLM",
    "arcee",
    Positions.ROTARY,
    has_rms_norm=True,
    activation=ActivationType.GELU,
    modules=_layers_of_llama(("up_proj", "c_fc"), ("down_proj", "c_proj")),
    keys=_KEYS_OF_LLAMA | {"head width": "head_dim"},
    bias_keys=_BIAS_OF_LLAMA,
    defaults={"hidden_act": "relu2"},
)

HUNYUAN = Architecture(
    "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_dense",
    Positions.ROTARY,
    has_rms_norm=True,
    activation=ActivationType.SWIGLU,
    modules=(*_layers_of_llama(*_GATED), *_QUERY_NORMS),
    keys=_KEYS_OF_LLAMA | {"head width": "head_dim"},
    has_query_norm=True,
    constants={"attention_bias": False},
)

SMOLLM3 = Architecture(
    "SmolLM3ForCausalLM",
    "smollm3",
    Positions.NONE,
    has_rms_norm=True,
    activation=ActivationType.SWIGLU,
    modules=_layers_of_llama(*_GATED),
    keys=_KEYS_OF_LLAMA,
    bias_keys=_BIAS_OF_LLAMA,
    ties_by_default=True,
    constants={"use_sliding_window": False},
)

STABLELM = Architecture(
    "StableLmForCausalLM",
    "stablelm",
    Positions.ROTARY,
    has_rms_norm=False,
    activation=ActivationType.SWIGLU,
    modules=_layers_of_llama(*_GATED),
    keys=_KEYS_OF_LLAMA | {"epsilon": "layer_norm_eps"},
    dropout_keys=("attention_dropout", "hidden_dropout"),
    constants={
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
    },
)

STARCODER2 = Architecture(
    "Starcoder2ForCausalLM",
    "starcoder2",
    Positions.ROTARY,
    has_rms_norm=False,
    activation=ActivationType.GELU,
    modules=_layers_of_llama(("c_fc", "c_fc"), ("c_proj", "c_proj")),
    keys=_KEYS_OF_LLAMA | {"epsilon": "norm_epsilon"},
    dropout_keys=("attention_dropout", "residual_dropout", "embedding_dropout"),
    bias_keys=("use_bias",),
    ties_by_default=True,
    constants={"sliding_window": None},
    defaults={"hidden_act": "gelu_pytorch_tanh", "use_bias": True},
)


def _block_of_gpt2(theirs: str, ours: tuple[str, ...], role: Role) -> ModuleNames:
    names = tuple(f"transformer.h.{{}}.{name}" for name in ours)
    return ModuleNames(f"transformer.h.{{}}.{theirs}", names, role, transposed=role is Role.LINEAR)


GPT2 = Architecture(
    "GPT2LMHeadModel",
    "gpt2",
    Positions.LEARNED,
    has_rms_norm=False,
    activation=ActivationType.GELU,
    modules=(
        ModuleNames("transformer.wte", ("transformer.wte",), Role.EMBEDDING),
        ModuleNames("transformer.wpe", ("transformer.wpe",), Role.EMBEDDING),
        _block_of_gpt2("ln_1", ("attention_norm",), Role.NORM),
        _block_of_gpt2("attn.c_attn", ("attn.q_attn", "attn.k_attn", "attn.v_attn"), Role.LINEAR),
        _block_of_gpt2("attn.c_proj", ("attn.c_proj",), Role.LINEAR),
        _block_of_gpt2("ln_2", ("ffn_norm",), Role.NORM),
        _block_of_gpt2("mlp.c_fc", ("mlp.c_fc",), Role.LINEAR),
        _block_of_gpt2("mlp.c_proj", ("mlp.c_proj",), Role.LINEAR),
        ModuleNames("transformer.ln_f", ("transformer.lm_head_norm",), Role.NORM),
        ModuleNames("lm_head", ("transformer.lm_head",), Role.EMBEDDING),
    ),
    keys={
        "vocab_size": "vocab_size",
        "sequence_length": "n_positions",
        "n_layer": "n_layer",
        "n_head_q": "n_head",
        "n_embd": "n_embd",
        "hidden width": "n_inner",
        "activation": "activation_function",
        "epsilon": "layer_norm_epsilon",
    },
    dropout_keys=("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    always_has_bias=True,
    has_grouped_queries=False,
    ties_by_default=True,
    constants={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    defaults={"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
)

ARCHITECTURES = (LLAMA, GPT2, STARCODER2, STABLELM, ARCEE, SMOLLM3, HUNYUAN)
"""Those that are tried, in this order."""
