"""Sizes of a model that must fit together. Free of torch: checked from the config."""

from __future__ import annotations

from typing import Any

from modalities.registry.rules import Rule


def heads_divide_width(n_head_q: int, n_embd: int) -> str | None:
    """Each query head has an equal part of the width."""
    return f"n_embd {n_embd} is not divisible by n_head_q {n_head_q}" if n_embd % n_head_q else None


def groups_divide_heads(n_head_kv: int, n_head_q: int) -> str | None:
    """Each key-value head serves the same number of query heads."""
    return f"n_head_q {n_head_q} is not divisible by n_head_kv {n_head_kv}" if n_head_q % n_head_kv else None


def norm_fits(name: str) -> Rule:
    """The norm of that name is over the model's width."""

    def check(norm: dict[str, Any], n_embd: int) -> str | None:
        size = norm_size(norm)
        return None if size == n_embd else f"{name} is for {size} values, but n_embd is {n_embd}"

    return Rule((name, "n_embd"), check)


def head_norm_fits(norm: dict[str, Any], n_embd: int, n_head_q: int) -> str | None:
    """The norm of queries and keys is over the width of a head."""
    width = n_embd // n_head_q
    if norm_size(norm) == width:
        return None
    return (
        f"attention_config: qk_norm_config is for {norm_size(norm)} values, but a head has "
        f"n_embd {n_embd} / n_head_q {n_head_q} = {width}"
    )


def rotary_fits(transforms: list[dict[str, Any]], n_embd: int, n_head_q: int) -> str | None:
    """A rotary transform has the sizes of its model, whose heads have two halves."""
    for transform in transforms:
        if transform.get("type_hint") != "RotaryTransform":
            continue
        rotary = transform["config"]
        if (rotary["n_embd"], rotary["n_head"]) != (n_embd, n_head_q):
            return (
                f"attention_config: RotaryTransform has n_embd {rotary['n_embd']} and n_head {rotary['n_head']}, "
                f"but the model has n_embd {n_embd} and n_head_q {n_head_q}"
            )
        if (n_embd // n_head_q) % 2:
            return (
                f"attention_config: RotaryTransform needs heads of an even width, but n_embd {n_embd} / "
                f"n_head_q {n_head_q} = {n_embd // n_head_q}"
            )
        if rotary["seq_length_dim"] not in (-2, 2):
            return f"attention_config: seq_length_dim is {rotary['seq_length_dim']}; this model needs -2"
    return None


def norm_size(norm: dict[str, Any]) -> int | None:
    """Number of values that a norm's settings are for."""
    size: int | None = norm["config"].get("ndim", norm["config"].get("normalized_shape"))
    return size


GPT2_RULES = (
    Rule(("n_head_q", "n_embd"), heads_divide_width),
    Rule(("n_head_kv", "n_head_q"), groups_divide_heads),
    *(norm_fits(name) for name in ("attention_norm_config", "ffn_norm_config", "lm_head_norm_config")),
    Rule(("attention_config.qk_norm_config", "n_embd", "n_head_q"), head_norm_fits),
    Rule(("attention_config.qkv_transforms", "n_embd", "n_head_q"), rotary_fits),
)


def std_is_known(std: float | str, hidden_dim: int | None) -> str | None:
    """A standard deviation is a number, or follows from the width."""
    if isinstance(std, str) and std != "auto":
        return f"std is {std}; it must be a number or auto"
    if not isinstance(std, str) and std < 0:
        return f"std is {std}; it must not be negative"
    return "std auto needs hidden_dim, the width of the model" if std == "auto" and hidden_dim is None else None


def depth_is_known(weight_init_type: str, num_layers: int | None) -> str | None:
    """Scaling by depth needs the depth."""
    if weight_init_type.lower() == "plain" or num_layers is not None:
        return None
    return f"weight_init_type {weight_init_type} needs num_layers, the number of blocks"


def model_is_initialized(model_type: str) -> str | None:
    """Whose parameter names are known."""
    return None if model_type.lower() == "gpt2" else f"model_type {model_type} is known, but not yet available"


COMPOSED_INITIALIZATION_RULES = (
    Rule(("model_type",), model_is_initialized),
    Rule(("std", "hidden_dim?"), std_is_known),
    Rule(("weight_init_type", "num_layers?"), depth_is_known),
)
