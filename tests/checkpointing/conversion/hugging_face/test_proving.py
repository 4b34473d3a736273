"""The comparison with transformers finds what is wrong, and then nothing has been written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modalities.checkpointing.conversion.hugging_face.exporting import export_hugging_face
from modalities.checkpointing.conversion.hugging_face.proving import Expected, expected_of, prove
from modalities.exceptions import CheckpointError, DamagedCheckpoint
from modalities.models.gpt2 import GPT2LLM
from tests.checkpointing.conversion.hugging_face.samples import CLASSIC, checkpoint_of, model_of, settings_of
from tests.checkpointing.samples import flip_a_bit

Exported = tuple[Path, GPT2LLM, Expected]


@pytest.fixture
def exported(tmp_path: Path) -> Exported:
    settings = settings_of()
    model = model_of(settings)
    export_hugging_face(checkpoint_of(tmp_path / "checkpoints", model), settings, None, tmp_path / "hf", verify=False)
    return tmp_path / "hf", model, expected_of(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-3},
        {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"hidden_act": "gelu"},
        {"num_hidden_layers": 3},
        {"num_key_value_heads": 4},
        {"num_hidden_layers": 1},
        {"model_type": "unheard_of"},
    ],
)
def test_a_wrong_entry_is_found(exported: Exported, changes: dict[str, Any]) -> None:
    folder, model, expected = exported
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError, match=r"differ|missing|unexpected|mismatched|does not load"):
        prove(folder, model, expected)


@pytest.mark.parametrize(("one", "other"), [("q_proj", "o_proj"), ("k_proj", "v_proj")])
def test_exchanged_weights_are_found(exported: Exported, one: str, other: str) -> None:
    folder, model, expected = exported
    assert prove(folder, model, expected) <= 1e-5
    file = folder / "model.safetensors"
    tensors = load_file(file)
    names = [f"model.layers.1.self_attn.{name}.weight" for name in (one, other)]
    tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="logits of transformers differ by"):
        prove(folder, model, expected)


def test_what_is_not_a_number_is_no_equal(exported: Exported) -> None:
    folder, model, expected = exported
    with torch.no_grad():
        expected.logits_BTV[0, 0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="differ"):
        prove(folder, model, expected)


@pytest.mark.parametrize("length", [1, 2, 3, 200])
def test_models_of_any_length_are_compared(tmp_path: Path, length: int) -> None:
    settings = settings_of(**CLASSIC, sequence_length=length)
    checkpoint = checkpoint_of(tmp_path / "checkpoints", model_of(settings))
    assert export_hugging_face(checkpoint, settings, None, tmp_path / "hf").max_difference is not None


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    settings = settings_of()
    checkpoint = checkpoint_of(tmp_path / "checkpoints", model_of(settings))
    flip_a_bit(checkpoint.path / "__0_0.distcp")
    with pytest.raises(DamagedCheckpoint, match=r"__0_0\.distcp"):
        export_hugging_face(checkpoint, settings, None, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"n_layer": 1}, "unexpected  transformer.h.1"),
        ({"ffn_hidden": 70}, "shape"),
        ({"bias": True}, "missing     transformer.h.0.attn.q_attn.bias"),
        ({"use_weight_tying": True}, "the config says use_weight_tying: true, but"),
    ],
)
def test_a_config_of_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    checkpoint = checkpoint_of(tmp_path / "checkpoints", model_of(settings_of()))
    with pytest.raises(CheckpointError) as caught:
        export_hugging_face(checkpoint, settings_of(**changes), None, tmp_path / "hf")
    assert told in str(caught.value)
    assert not (tmp_path / "hf").exists()


def test_another_base_of_the_rotary_embedding_is_refused(tmp_path: Path) -> None:
    rotary = {"n_embd": 32, "n_head": 4, "seq_length_dim": -2, "base_freq": 10000}
    attention = {"qkv_transforms": [{"type_hint": "RotaryTransform", "config": rotary}]}
    checkpoint = checkpoint_of(tmp_path / "checkpoints", model_of(settings_of(attention_config=attention)))
    with pytest.raises(CheckpointError, match="trained with another base_freq"):
        export_hugging_face(checkpoint, settings_of(), None, tmp_path / "hf")


def test_shards_and_narrow_types_are_proven_too(tmp_path: Path) -> None:
    settings = settings_of(use_weight_tying=True)
    checkpoint = checkpoint_of(tmp_path / "checkpoints", model_of(settings))
    for dtype in (torch.bfloat16, torch.float16):
        done = export_hugging_face(checkpoint, settings, None, tmp_path / "hf", dtype=dtype, max_shard_bytes=10_000)
        assert done.num_files > 2
        assert done.max_difference is not None
        assert done.max_difference <= 1e-5
        assert (tmp_path / "hf" / "model.safetensors.index.json").is_file()
        shutil.rmtree(tmp_path / "hf")
