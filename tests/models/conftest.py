"""The tiniest GPT-2, by its config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from modalities.models.components import GPT2LLMConfig
from modalities.models.gpt2 import GPT2LLM


def norm(size: int, kind: str = "layer_norm") -> dict[str, Any]:
    return {"norm_type": kind, "config": {"ndim" if kind == "rms_norm" else "normalized_shape": size}}


def gpt2_fields(**changes: Any) -> dict[str, Any]:
    n_embd, n_head_q = changes.get("n_embd", 32), changes.get("n_head_q", 4)
    rotary = {"n_embd": n_embd, "n_head": n_head_q, "seq_length_dim": -2, "base_freq": 10000}
    fields: dict[str, Any] = {
        "sample_key": "input_ids",
        "prediction_key": "logits",
        "poe_type": "NOPE",
        "sequence_length": 16,
        "vocab_size": 61,
        "n_layer": 2,
        "n_head_q": n_head_q,
        "n_head_kv": 2,
        "n_embd": n_embd,
        "ffn_hidden": 48,
        "dropout": 0.0,
        "bias": True,
        "attention_config": {"qkv_transforms": [{"type_hint": "RotaryTransform", "config": rotary}]},
        "attention_implementation": "pytorch_flash",
        "activation_type": "swiglu",
        "attention_norm_config": norm(n_embd),
        "ffn_norm_config": norm(n_embd),
        "lm_head_norm_config": norm(n_embd),
        "use_weight_tying": False,
        "seed": 7,
        "enforce_swiglu_hidden_dim_multiple_of": 16,
    }
    return fields | changes


def make_gpt2(**changes: Any) -> GPT2LLM:
    config = GPT2LLMConfig(**gpt2_fields(**changes))
    return GPT2LLM(**{name: getattr(config, name) for name in GPT2LLMConfig.model_fields})


@pytest.fixture
def gpt2() -> Callable[..., GPT2LLM]:
    return make_gpt2


@pytest.fixture
def fields() -> Callable[..., dict[str, Any]]:
    return gpt2_fields


@pytest.fixture
def token_ids() -> torch.Tensor:
    return torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(3))
