"""Each axis of a model's config: stock transformers computes the same, and the way back gives the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from modalities.checkpointing.conversion.hugging_face.exporting import export_hugging_face
from modalities.checkpointing.conversion.hugging_face.importing import import_hugging_face
from modalities.inference.text_generation import generate_tokens
from modalities.testing.tiny import read_tensors
from tests.checkpointing.conversion.hugging_face.samples import (
    CLASSIC,
    HEADS,
    NO_POSITIONS,
    ROTARY_ATTENTION,
    WIDTH,
    checkpoint_of,
    layer_norm,
    model_of,
    norms,
    rms_norm,
    settings_of,
)

QUERY_NORM = {**ROTARY_ATTENTION, "qk_norm_config": rms_norm(WIDTH // HEADS)}
OWN_RMS_NORM = {"norm_type": "rms_norm", "config": {"ndim": WIDTH, "epsilon": 1e-5, "bias": False}}
LAYER_NORM, BARE_NORM = norms(layer_norm()), norms(layer_norm(bias=False))

AXES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("LlamaForCausalLM", {}),
    "bias": ("LlamaForCausalLM", {"bias": True}),
    "tied": ("LlamaForCausalLM", {"use_weight_tying": True}),
    "all heads": ("LlamaForCausalLM", {"n_head_kv": HEADS}),
    "one key-value head": ("LlamaForCausalLM", {"n_head_kv": 1}),
    "large epsilon": ("LlamaForCausalLM", norms(rms_norm(eps=0.1))),
    "own root-mean-square norm": ("LlamaForCausalLM", norms(OWN_RMS_NORM)),
    "query norm": ("HunYuanDenseV1ForCausalLM", {"attention_config": QUERY_NORM}),
    "no positions": ("SmolLM3ForCausalLM", {"attention_config": NO_POSITIONS}),
    "no positions, bias, tied": (
        "SmolLM3ForCausalLM",
        {"attention_config": NO_POSITIONS, "bias": True, "use_weight_tying": True},
    ),
    "GELU": ("ArceeForCausalLM", {"activation_type": "gelu"}),
    "GELU, bias, tied": ("ArceeForCausalLM", {"activation_type": "gelu", "bias": True, "use_weight_tying": True}),
    "layer norm": ("StableLmForCausalLM", LAYER_NORM),
    "layer norm without shift, tied": ("StableLmForCausalLM", {**BARE_NORM, "use_weight_tying": True}),
    "layer norm, GELU": ("Starcoder2ForCausalLM", {**LAYER_NORM, "activation_type": "gelu"}),
    "layer norm, GELU, bias, tied": (
        "Starcoder2ForCausalLM",
        {**LAYER_NORM, "activation_type": "gelu", "bias": True, "use_weight_tying": True},
    ),
    "classic": ("GPT2LMHeadModel", CLASSIC),
    "classic, tied": ("GPT2LMHeadModel", {**CLASSIC, "use_weight_tying": True}),
    "classic without biases": ("GPT2LMHeadModel", {**CLASSIC, **BARE_NORM, "bias": False}),
    "classic, one norm without shift": ("GPT2LMHeadModel", {**CLASSIC, "ffn_norm_config": layer_norm(bias=False)}),
}


@pytest.mark.parametrize(("architecture", "changes"), AXES.values(), ids=AXES)
def test_transformers_computes_the_same_and_the_way_back_is_bitwise(
    tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    settings = settings_of(**changes)
    model = model_of(settings)
    checkpoint = checkpoint_of(tmp_path / "checkpoints", model)
    done = export_hugging_face(checkpoint, settings, None, tmp_path / "hf")
    assert done.architecture == architecture
    assert done.max_difference is not None

    # not by the package's own comparison alone
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert type(theirs).__name__ == architecture
    ids = torch.arange(48).reshape(2, 24) % 61
    with torch.no_grad():
        expected = model(ids)
        assert expected.abs().max() > 1
        torch.testing.assert_close(theirs(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
    greedy = list(generate_tokens(model, [1, 2, 3], 12, temperature=0))
    for use_cache in (True, False):
        prompt = torch.tensor([[1, 2, 3]])
        found = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, use_cache=use_cache
        )
        assert found[0, 3:].tolist() == greedy

    back = import_hugging_face(tmp_path / "hf", tmp_path / "back")
    before, after = read_tensors(checkpoint.path), read_tensors(back.checkpoint)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype
        assert torch.equal(tensor.view(torch.int32), after[key].view(torch.int32)), key


def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    settings = settings_of(use_weight_tying=True)
    checkpoint = checkpoint_of(tmp_path / "checkpoints", model_of(settings))
    export_hugging_face(checkpoint, settings, None, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"] is True
