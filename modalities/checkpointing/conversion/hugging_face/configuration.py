"""``config.json`` of transformers from a model's settings, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from modalities.checkpointing.conversion.hugging_face.architectures import ARCHITECTURES, Architecture, Positions
from modalities.checkpointing.conversion.hugging_face.obstacles import (
    MODEL_NORMS,
    QUERY_NORM,
    epsilon_of,
    has_shift,
    rotary_of,
)
from modalities.config.suggestions import did_you_mean
from modalities.exceptions import CheckpointError
from modalities.models.components import GPT2LLMConfig
from modalities.models.feed_forward import swiglu_hidden_width
from modalities.models.settings import ActivationType

ZEROS_KEY = "modalities_zeros"
"""In ``config.json``: fields that are false in our model, whose biases the architecture has and which are zeros there."""

BIAS = "bias"
SHIFTS = tuple(f"{name}.config.bias" for name in MODEL_NORMS)

_ACTIVATIONS = {ActivationType.SWIGLU: "silu", ActivationType.GELU: "gelu"}
_DEFAULT_ROPE_THETA = 10000.0
_DEFAULT_ROTARY_PARTS = {"stablelm": 0.25}
_NEVER = ("auto_map", "quantization_config", "rope_scaling")
"""What changes the weights or the computation in ways that no model of ours has."""


def config_of(settings: GPT2LLMConfig, architecture: Architecture, dtype: str) -> dict[str, Any]:
    """The content of ``config.json``, without the ids of special tokens.

    Args:
        settings: Of the model; the architecture expresses it.
        architecture: Of transformers.
        dtype: Of the weights, as torch names it.
    """
    rotary = rotary_of(settings)
    values = {
        "vocab_size": settings.vocab_size,
        "sequence_length": settings.sequence_length,
        "n_layer": settings.n_layer,
        "n_head_q": settings.n_head_q,
        "n_head_kv": settings.n_head_kv,
        "n_embd": settings.n_embd,
        "hidden width": _hidden_width(settings),
        "head width": settings.n_embd // settings.n_head_q,
        "activation": _ACTIVATIONS[settings.activation_type],
        "epsilon": epsilon_of(settings.attention_norm_config),
    }
    config: dict[str, Any] = {"architectures": [architecture.name], "model_type": architecture.model_type}
    config |= {theirs: values[ours] for ours, theirs in architecture.keys.items()}
    if rotary:
        theta = float(rotary[0].base_freq)
        # the first is what older versions of transformers read
        config["rope_theta"] = theta
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
        if architecture.model_type in _DEFAULT_ROTARY_PARTS:
            config["partial_rotary_factor"] = 1.0
            config["rope_parameters"]["partial_rotary_factor"] = 1.0
    if architecture.positions is Positions.NONE:
        config["no_rope_layers"] = [0] * settings.n_layer
    config |= dict.fromkeys(architecture.dropout_keys, settings.dropout)
    config |= dict.fromkeys(architecture.bias_keys, settings.bias)
    config |= architecture.constants
    zeros = zeros_of(settings, architecture)
    return config | {
        "tie_word_embeddings": settings.use_weight_tying,
        "use_cache": True,
        "dtype": dtype,
        **({ZEROS_KEY: zeros} if zeros else {}),
    }


def zeros_of(settings: GPT2LLMConfig, architecture: Architecture) -> list[str]:
    """Fields that are false, whose biases the architecture has nevertheless: zeros there leave the numbers as they are."""
    zeros = [BIAS] if architecture.always_has_bias and not settings.bias else []
    if not architecture.has_rms_norm:
        zeros += [f"{name}.config.bias" for name in MODEL_NORMS if not has_shift(getattr(settings, name))]
    return zeros


def settings_of(config: Mapping[str, Any], zeros: Sequence[str] = ()) -> tuple[Architecture, GPT2LLMConfig]:
    """The architecture that a ``config.json`` names, and the settings of the model of ours that computes the same.

    Args:
        config: Its content.
        zeros: Fields whose biases are left out, since they are zeros.

    Raises:
        CheckpointError: No model of ours computes the same; the entry that stands in the way is named.
    """
    architecture = _architecture_of(config)
    try:
        found = list(_obstacles(config, architecture))
        if not found:
            return architecture, GPT2LLMConfig.model_validate(_fields_of(config, architecture, zeros))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"config.json makes no sense: {where}: {first['msg']}") from error
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(f"config.json makes no sense: {error}") from error
    raise CheckpointError("\n".join([f"no model of ours computes what this {architecture.name} does:", *found]))


def _architecture_of(config: Mapping[str, Any]) -> Architecture:
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    for architecture in ARCHITECTURES:
        if name == architecture.name or (name is None and config.get("model_type") == architecture.model_type):
            return architecture
    known = [architecture.name for architecture in ARCHITECTURES]
    wanted = str(name or config.get("model_type"))
    raise CheckpointError(f"config.json names the architecture {wanted}; {did_you_mean(wanted, known, 'known ones')}")


def _obstacles(config: Mapping[str, Any], architecture: Architecture) -> Iterator[str]:
    def tell(key: str, needed: Any) -> str:
        return f"  {key} is {_get(config, architecture, key)!r}; it must be {needed!r}"

    for key in _NEVER:
        if config.get(key) is not None:
            yield f"  {key} is set: weights or code of that kind are not imported"
    for key, value in architecture.constants.items():
        if config.get(key, value) != value:
            yield tell(key, value)
    activation = architecture.keys["activation"]
    if _get(config, architecture, activation) != _ACTIVATIONS[architecture.activation]:
        yield tell(activation, _ACTIVATIONS[architecture.activation])
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        yield tell("layer_types", "full_attention")
    if len({bool(_get(config, architecture, key)) for key in architecture.bias_keys}) > 1:
        yield f"  {' and '.join(architecture.bias_keys)} differ; this model has one bias for both"
    if len({float(config.get(key) or 0.0) for key in architecture.dropout_keys}) > 1:
        yield f"  {', '.join(architecture.dropout_keys)} differ; this model has one dropout: give them one value"
    if architecture.positions is Positions.ROTARY:
        yield from _rotary_obstacles(config, architecture)
    if architecture.positions is Positions.NONE and any(config.get("no_rope_layers") or [1]):
        yield tell("no_rope_layers", "a list of zeros")
    head_width = config.get(architecture.keys.get("head width", ""))
    width, num_heads = (_get(config, architecture, architecture.keys[key]) for key in ("n_embd", "n_head_q"))
    if head_width is not None and width is not None and num_heads and head_width * num_heads != width:
        yield f"  head_dim is {head_width}; it must be {width} / {num_heads}, the width over the number of heads"


def _rotary_obstacles(config: Mapping[str, Any], architecture: Architecture) -> Iterator[str]:
    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        yield f"  rope_parameters.rope_type is {kind!r}; it must be 'default'"
    theta = _rope_theta(config)
    if theta != int(theta):
        yield f"  rope_theta is {theta}; base_freq is a whole number here"
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    part = _DEFAULT_ROTARY_PARTS.get(architecture.model_type, 1.0) if part is None else part
    if part != 1.0:
        yield f"  partial_rotary_factor is {part}; it must be 1.0"


def _rope_theta(config: Mapping[str, Any]) -> float:
    return float(
        (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or _DEFAULT_ROPE_THETA
    )


def _fields_of(config: Mapping[str, Any], architecture: Architecture, zeros: Sequence[str]) -> dict[str, Any]:
    def get(word: str) -> Any:
        return _get(config, architecture, architecture.keys[word])

    n_embd, n_head_q = get("n_embd"), get("n_head_q")
    hidden_width = get("hidden width") or 4 * n_embd
    rotary = {"n_embd": n_embd, "n_head": n_head_q, "seq_length_dim": -2, "base_freq": int(_rope_theta(config))}
    has_rotary = architecture.positions is Positions.ROTARY
    is_gated = architecture.activation is ActivationType.SWIGLU

    def norm(size: int, shift_field: str) -> dict[str, Any]:
        if architecture.has_rms_norm:
            return {"norm_type": "pytorch_rms_norm", "config": {"normalized_shape": size, "eps": get("epsilon")}}
        shift = shift_field not in zeros
        return {"norm_type": "layer_norm", "config": {"normalized_shape": size, "eps": get("epsilon"), "bias": shift}}

    query_norm = norm(n_embd // n_head_q, QUERY_NORM) if architecture.has_query_norm else None
    has_bias = architecture.always_has_bias or any(_get(config, architecture, key) for key in architecture.bias_keys)
    return {
        "sample_key": "input_ids",
        "prediction_key": "logits",
        "use_meta_device": True,
        "poe_type": "ABSOLUTE" if architecture.positions is Positions.LEARNED else "NOPE",
        "sequence_length": get("sequence_length"),
        "vocab_size": get("vocab_size"),
        "n_layer": get("n_layer"),
        "n_head_q": n_head_q,
        "n_head_kv": (get("n_head_kv") if architecture.has_grouped_queries else None) or n_head_q,
        "n_embd": n_embd,
        # two thirds of it, rounded down, are the hidden width
        "ffn_hidden": (3 * hidden_width + 1) // 2 if is_gated else hidden_width,
        "enforce_swiglu_hidden_dim_multiple_of": 1,
        "dropout": float(config.get(architecture.dropout_keys[0]) or 0.0),
        "bias": has_bias and BIAS not in zeros,
        "attention_config": {
            "qkv_transforms": [{"type_hint": "RotaryTransform", "config": rotary}] if has_rotary else [],
            "qk_norm_config": query_norm,
        },
        "attention_implementation": "pytorch_flash",
        "activation_type": architecture.activation.value,
        **{name: norm(n_embd, f"{name}.config.bias") for name in MODEL_NORMS},
        "use_weight_tying": config.get("tie_word_embeddings", architecture.ties_by_default),
        "seed": None,
    }


def _get(config: Mapping[str, Any], architecture: Architecture, key: str) -> Any:
    """An entry, or what holds without it."""
    return config.get(key, architecture.defaults.get(key, architecture.constants.get(key)))


def _hidden_width(settings: GPT2LLMConfig) -> int:
    if settings.activation_type is ActivationType.SWIGLU:
        return swiglu_hidden_width(settings.ffn_hidden, settings.enforce_swiglu_hidden_dim_multiple_of)
    return settings.ffn_hidden
