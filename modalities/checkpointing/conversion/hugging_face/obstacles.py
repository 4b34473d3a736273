"""Which architecture expresses a model of ours exactly, and where none does, which field stands in the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from modalities.checkpointing.conversion.hugging_face.architectures import ARCHITECTURES, Architecture, Positions
from modalities.exceptions import CheckpointError
from modalities.models.components import GPT2LLMConfig
from modalities.models.settings import LayerNorms, PositionTypes, RotaryTransformConfig, RotaryTransformWrapper

MODEL_NORMS = ("attention_norm_config", "ffn_norm_config", "lm_head_norm_config")
QUERY_NORM = "attention_config.qk_norm_config"


@dataclass(frozen=True)
class Obstacle:
    """A field whose value an architecture cannot express.

    Args:
        field: Dotted, below the model's entry.
        found: Its value.
        needed: What the architecture has instead.
    """

    field: str
    found: str
    needed: str


def choose_architecture(settings: GPT2LLMConfig) -> Architecture:
    """The first architecture that expresses the model exactly.

    Raises:
        CheckpointError: None does; what stands in the way of the nearest ones is told.
    """
    candidates = [(architecture, list(obstacles(settings, architecture))) for architecture in ARCHITECTURES]
    fewest = min(len(found) for _, found in candidates)
    nearest = [(architecture, found) for architecture, found in candidates if len(found) == fewest]
    if not fewest:
        return nearest[0][0]
    lines = ["no architecture of transformers expresses this model without code of its own; in the way stands, of"]
    for architecture, found in nearest:
        lines.append(f"  {architecture.name}:")
        lines += [f"    model_raw.{x.field} is {x.found}; it needs {x.needed}" for x in found]
    lines.append("docs/checkpointing.md tells which fields which architecture has")
    raise CheckpointError("\n".join(lines))


def obstacles(settings: GPT2LLMConfig, architecture: Architecture) -> Iterator[Obstacle]:
    """All that keeps an architecture from computing what the model computes."""
    yield from _in_positions(settings, architecture)
    query_norm = settings.attention_config.qk_norm_config
    if (query_norm is not None) is not architecture.has_query_norm:
        found = "not set" if query_norm is None else f"a {query_norm.norm_type.value}"
        needed = "a root-mean-square norm" if architecture.has_query_norm else "none"
        yield Obstacle(QUERY_NORM, found, needed)
    if settings.activation_type is not architecture.activation:
        yield Obstacle("activation_type", settings.activation_type.value, architecture.activation.value)
    if not architecture.has_grouped_queries and settings.n_head_kv != settings.n_head_q:
        yield Obstacle("n_head_kv", str(settings.n_head_kv), f"{settings.n_head_q}, as n_head_q")
    if settings.bias and not (architecture.bias_keys or architecture.always_has_bias):
        yield Obstacle("bias", "true", "false")
    yield from _in_norms(settings, architecture)


def rotary_of(settings: GPT2LLMConfig) -> list[RotaryTransformConfig]:
    """The rotary embeddings among the transforms of queries and keys."""
    transforms = settings.attention_config.qkv_transforms
    return [transform.config for transform in transforms if isinstance(transform, RotaryTransformWrapper)]


def epsilon_of(norm: Any) -> float:
    """What a norm adds to the variance, or to the mean square."""
    return float(norm.config.epsilon if norm.norm_type is LayerNorms.rms_norm else norm.config.eps)


def has_shift(norm: Any) -> bool:
    """Whether a norm has a bias."""
    return bool(getattr(norm.config, "bias", False))


def norms_of(settings: GPT2LLMConfig) -> dict[str, Any]:
    """The settings of every norm, by the field that they stand in."""
    norms: dict[str, Any] = {name: getattr(settings, name) for name in MODEL_NORMS}
    if settings.attention_config.qk_norm_config is not None:
        norms[QUERY_NORM] = settings.attention_config.qk_norm_config
    return norms


def _in_positions(settings: GPT2LLMConfig, architecture: Architecture) -> Iterator[Obstacle]:
    wanted = PositionTypes.ABSOLUTE if architecture.positions is Positions.LEARNED else PositionTypes.NOPE
    if settings.poe_type is not wanted:
        yield Obstacle("poe_type", settings.poe_type.value, wanted.value)
    num_rotary, num_wanted = len(rotary_of(settings)), int(architecture.positions is Positions.ROTARY)
    if num_rotary != num_wanted:
        field = "attention_config.qkv_transforms"
        yield Obstacle(field, f"a list with {num_rotary} RotaryTransform", str(num_wanted))


def _in_norms(settings: GPT2LLMConfig, architecture: Architecture) -> Iterator[Obstacle]:
    epsilon = epsilon_of(settings.attention_norm_config)
    for name, norm in norms_of(settings).items():
        if name == QUERY_NORM and not architecture.has_query_norm:
            continue
        is_layer_norm = norm.norm_type is LayerNorms.layer_norm
        if is_layer_norm is architecture.has_rms_norm:
            needed = "rms_norm or pytorch_rms_norm" if architecture.has_rms_norm else "layer_norm"
            yield Obstacle(f"{name}.norm_type", norm.norm_type.value, needed)
            continue
        if is_layer_norm and not norm.config.elementwise_affine:
            yield Obstacle(f"{name}.config.elementwise_affine", "false", "true")
        if has_shift(norm) and architecture.has_rms_norm:
            yield Obstacle(f"{name}.config.bias", "true", "false")
        if epsilon_of(norm) != epsilon:
            field = "epsilon" if norm.norm_type is LayerNorms.rms_norm else "eps"
            needed = f"{epsilon:g}, as attention_norm_config: it has one for all norms"
            yield Obstacle(f"{name}.config.{field}", f"{epsilon_of(norm):g}", needed)
