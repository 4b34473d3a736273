"""A model that is small enough to run out of room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from modalities.models.components import GPT2LLMConfig
from modalities.models.gpt2 import GPT2LLM

NORM = {"norm_type": "pytorch_rms_norm", "config": {"normalized_shape": 16}}
ROTARY = {"n_embd": 16, "n_head": 2, "seq_length_dim": -2, "base_freq": 10000}


def make_gpt2(**changes: Any) -> GPT2LLM:
    fields: dict[str, Any] = {
        "sample_key": "input_ids",
        "prediction_key": "logits",
        "poe_type": "NOPE",
        "sequence_length": 8,
        "vocab_size": 31,
        "n_layer": 1,
        "n_head_q": 2,
        "n_head_kv": 1,
        "n_embd": 16,
        "ffn_hidden": 16,
        "dropout": 0.3,
        "bias": False,
        "attention_config": {"qkv_transforms": [{"type_hint": "RotaryTransform", "config": ROTARY}]},
        "attention_implementation": "pytorch_flash",
        "activation_type": "gelu",
        "attention_norm_config": NORM,
        "ffn_norm_config": NORM,
        "lm_head_norm_config": NORM,
        "use_weight_tying": False,
        "seed": 3,
    }
    config = GPT2LLMConfig(**fields | changes)
    return GPT2LLM(**{name: getattr(config, name) for name in GPT2LLMConfig.model_fields})


@pytest.fixture
def make_model() -> Callable[..., GPT2LLM]:
    return make_gpt2
