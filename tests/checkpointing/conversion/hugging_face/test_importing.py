"""Folders that stock transformers writes, with random weights, and those that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from modalities.checkpointing.conversion.hugging_face.exporting import export_hugging_face
from modalities.checkpointing.conversion.hugging_face.importing import import_hugging_face
from modalities.exceptions import CheckpointError, DamagedCheckpoint
from modalities.testing.tiny import read_tensors
from tests.checkpointing.conversion.hugging_face.samples import (
    CLASSIC,
    checkpoint_of,
    layer_norm,
    model_of,
    norms,
    settings_of,
)

SIZES = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 45,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
SIZES_OF_GPT2 = {
    "vocab_size": 53,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "activation_function": "gelu",
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}

STOCK: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", SIZES),
    "Llama, biases, tied, another base": (
        "Llama",
        {
            **SIZES,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "Arcee": ("Arcee", {**SIZES, "hidden_act": "gelu"}),
    "SmolLM3": ("SmolLM3", {**SIZES, "no_rope_layers": [0, 0], "pad_token_id": None}),
    "HunYuan": ("HunYuanDenseV1", {**SIZES, "head_dim": 8}),
    "StableLM": ("StableLm", {**SIZES, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    "Starcoder2": ("Starcoder2", {**SIZES, "hidden_act": "gelu"}),
    "GPT-2": ("GPT2", SIZES_OF_GPT2),
    "GPT-2, narrow, two matrices": ("GPT2", {**SIZES_OF_GPT2, "n_inner": 20, "tie_word_embeddings": False}),
}


def stock_folder(folder: Path, name: str, fields: dict[str, Any]) -> Path:
    """What ``save_pretrained`` writes of a fresh model."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def edit(folder: Path, **changes: Any) -> None:
    """Change entries of ``config.json``."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(("name", "fields"), STOCK.values(), ids=STOCK)
def test_what_stock_transformers_writes_computes_the_same_here(
    tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    done = import_hugging_face(stock_folder(tmp_path / "hf", name, fields), tmp_path / "out")
    assert done.max_difference is not None
    assert done.max_difference < 1e-5
    assert not done.has_tokenizer


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rope scaling": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        "rope_parameters.rope_type is 'linear'; it must be 'default'",
    ),
    "older rope scaling": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is set"),
    "activation": ({"hidden_act": "relu"}, "hidden_act is 'relu'; it must be 'silu'"),
    "one bias": ({"attention_bias": True}, "attention_bias and mlp_bias differ"),
    "head width": ({"head_dim": 16}, "head_dim is 16; it must be 32 / 4"),
    "code": ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "auto_map is set"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
    "attention": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
    "fractional base": ({"rope_parameters": {"rope_theta": 10000.5}}, "rope_theta is 10000.5"),
    "partial": ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    "unknown": ({"architectures": ["LlamaForCasualLM"]}, "did you mean `LlamaForCausalLM`"),
    "no number": ({"num_hidden_layers": "two"}, "config.json makes no sense: n_layer"),
    "absent": ({"hidden_size": None}, "config.json makes no sense"),
    "no dropout": ({"attention_dropout": "much"}, "config.json makes no sense"),
    "another depth": ({"num_hidden_layers": 1}, "unexpected  model.layers.1"),
    "another width of the layer": ({"intermediate_size": 44}, "shape"),
}


@pytest.mark.parametrize(("changes", "told"), REFUSED.values(), ids=REFUSED)
def test_what_no_model_of_ours_computes_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    folder = stock_folder(tmp_path / "hf", "Llama", SIZES)
    edit(folder, **changes)
    with pytest.raises(CheckpointError) as caught:
        import_hugging_face(folder, tmp_path / "out", verify=False)
    assert told in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_sliding_window_is_refused(tmp_path: Path) -> None:
    folder = stock_folder(tmp_path / "hf", "Starcoder2", {**SIZES, "hidden_act": "gelu", "sliding_window": 4})
    with pytest.raises(CheckpointError, match="sliding_window is 4; it must be None"):
        import_hugging_face(folder, tmp_path / "out")


def test_the_default_gelu_of_gpt2_is_refused(tmp_path: Path) -> None:
    folder = stock_folder(tmp_path / "hf", "GPT2", {**SIZES_OF_GPT2, "activation_function": "gelu_new"})
    with pytest.raises(CheckpointError, match="activation_function is 'gelu_new'; it must be 'gelu'"):
        import_hugging_face(folder, tmp_path / "out")


def test_pickles_are_refused(tmp_path: Path) -> None:
    folder = stock_folder(tmp_path / "hf", "Llama", SIZES)
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickles \(pytorch_model\.bin\).*save_pretrained"):
        import_hugging_face(folder, tmp_path / "out")


def test_damaged_weights_are_told(tmp_path: Path) -> None:
    folder = stock_folder(tmp_path / "hf", "Llama", SIZES)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors"):
        import_hugging_face(folder, tmp_path / "out")


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    folder = stock_folder(tmp_path / "hf", "Llama", SIZES)
    edit(folder, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="set tie_word_embeddings to false"):
        import_hugging_face(folder, tmp_path / "out")


def test_weights_are_widened_to_fp32_without_a_change(tmp_path: Path) -> None:
    settings = settings_of()
    checkpoint = checkpoint_of(tmp_path / "checkpoints", model_of(settings))
    export_hugging_face(checkpoint, settings, None, tmp_path / "hf", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    done = import_hugging_face(tmp_path / "hf", tmp_path / "out")
    before, after = read_tensors(checkpoint.path), read_tensors(done.checkpoint)
    for key, tensor in before.items():
        expected = tensor if key.endswith("inv_freq") else tensor.to(torch.bfloat16).float()
        assert torch.equal(expected, after[key]), key


def test_zeros_that_were_trained_on_elsewhere_are_biases(tmp_path: Path) -> None:
    settings = settings_of(**CLASSIC | norms(layer_norm(bias=False)) | {"bias": False})
    checkpoint = checkpoint_of(tmp_path / "checkpoints", model_of(settings))
    export_hugging_face(checkpoint, settings, None, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        theirs.transformer.h[1].ln_2.bias.fill_(0.5)
    theirs.save_pretrained(tmp_path / "tuned")
    done = import_hugging_face(tmp_path / "tuned", tmp_path / "out")
    biases = [key for key in read_tensors(done.checkpoint) if key.endswith(".bias")]
    assert biases == [f"app.model.transformer.h.{layer}.ffn_norm.bias" for layer in (0, 1)]
