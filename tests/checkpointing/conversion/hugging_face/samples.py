"""Tiny models with random weights everywhere, biases and norms too, and their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from modalities.checkpointing.conversion.dcp_writing import write_dcp
from modalities.checkpointing.conversion.hugging_face.configuration import SHIFTS
from modalities.checkpointing.conversion.lazy_tensor import LazyTensor
from modalities.checkpointing.discovery import Checkpoint, locate_checkpoint
from modalities.checkpointing.paths import checkpoint_name
from modalities.checkpointing.reading.sources import Form
from modalities.models.components import GPT2LLMConfig
from modalities.models.gpt2 import GPT2LLM
from modalities.progress import TrainingProgress

WIDTH, HEADS = 32, 4
ROTARY = {"n_embd": WIDTH, "n_head": HEADS, "seq_length_dim": -2, "base_freq": 5000}
ROTARY_ATTENTION = {"qkv_transforms": [{"type_hint": "RotaryTransform", "config": ROTARY}]}
NO_POSITIONS = {"qkv_transforms": [{"type_hint": "IdentityTransform", "config": {}}]}


def rms_norm(size: int = WIDTH, eps: float = 1e-5) -> dict[str, Any]:
    return {"norm_type": "pytorch_rms_norm", "config": {"normalized_shape": size, "eps": eps}}


def layer_norm(bias: bool = True, eps: float = 1e-5) -> dict[str, Any]:
    return {"norm_type": "layer_norm", "config": {"normalized_shape": WIDTH, "eps": eps, "bias": bias}}


def norms(norm: dict[str, Any]) -> dict[str, Any]:
    return {name.partition(".")[0]: norm for name in SHIFTS}


CLASSIC = {
    "poe_type": "ABSOLUTE",
    "attention_config": NO_POSITIONS,
    "n_head_kv": HEADS,
    "activation_type": "gelu",
    "bias": True,
    **norms(layer_norm()),
}
"""As GPT-2."""


def settings_of(**changes: Any) -> GPT2LLMConfig:
    """Rotary positions, root-mean-square norms, SwiGLU, grouped queries, an odd vocabulary; and changes."""
    fields: dict[str, Any] = {
        "sample_key": "x",
        "prediction_key": "logits",
        "poe_type": "NOPE",
        "sequence_length": 24,
        "vocab_size": 61,
        "n_layer": 2,
        "n_head_q": HEADS,
        "n_head_kv": 2,
        "n_embd": WIDTH,
        "ffn_hidden": 50,
        "dropout": 0.1,
        "bias": False,
        "attention_config": ROTARY_ATTENTION,
        "attention_implementation": "manual",
        "activation_type": "swiglu",
        "use_weight_tying": False,
        "enforce_swiglu_hidden_dim_multiple_of": 7,
        **norms(rms_norm()),
    }
    return GPT2LLMConfig.model_validate(fields | changes)


def model_of(settings: GPT2LLMConfig, seed: int = 0) -> GPT2LLM:
    """With large random weights, so that whatever is left out or exchanged shows in the logits."""
    model = GPT2LLM(**{name: getattr(settings, name) for name in GPT2LLMConfig.model_fields}).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3, generator=generator)
    return model


def checkpoint_of(folder: Path, model: GPT2LLM) -> Checkpoint:
    """A checkpoint of the model alone."""
    progress = TrainingProgress(3, 300, 8, 800)
    path = folder / checkpoint_name("tiny", progress)
    path.mkdir(parents=True)

    def lazy(name: str, tensor: torch.Tensor) -> LazyTensor:
        return LazyTensor(name, Form.of(tensor.shape, tensor.dtype), lambda: tensor)

    state = {name: lazy(name, tensor) for name, tensor in model.state_dict().items()}
    write_dcp(path, {"app": {"model": state}}, "tiny", progress)
    return locate_checkpoint(path)
