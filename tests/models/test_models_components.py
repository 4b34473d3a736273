from __future__ import annotations

import inspect

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from modalities.exceptions import UserError
from modalities.factory.rules import broken_rule
from modalities.models.compilation import compile_blocks
from modalities.models.components import ComposedInitializationConfig, GPT2LLMConfig, sign
from modalities.models.settings import AttentionImplementation, LayerNorms
from modalities.registry.fields import load_object


@pytest.mark.parametrize("spec", sign.specs, ids=lambda spec: spec.name)
def test_fields_are_the_parameters_of_the_builder(spec) -> None:
    assert list(spec.config.model_fields) == list(inspect.signature(load_object(spec.builds)).parameters)
    assert spec.summary
    assert all(field.description for field in spec.config.model_fields.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_head_q": 7}, "n_embd 32 is not divisible by n_head_q 7"),
        ({"n_head_kv": 3}, "n_head_q 4 is not divisible by n_head_kv 3"),
        (
            {"ffn_norm_config": {"norm_type": "rms_norm", "config": {"ndim": 16}}},
            "ffn_norm_config is for 16 values, but n_embd is 32",
        ),
        (
            {
                "attention_config": {
                    "qkv_transforms": [],
                    "qk_norm_config": {"norm_type": "rms_norm", "config": {"ndim": 32}},
                }
            },
            "qk_norm_config is for 32 values, but a head has n_embd 32 / n_head_q 4 = 8",
        ),
        (
            {
                "attention_config": {
                    "qkv_transforms": [
                        {
                            "type_hint": "RotaryTransform",
                            "config": {"n_embd": 32, "n_head": 2, "seq_length_dim": -2, "base_freq": 10000},
                        }
                    ]
                }
            },
            "RotaryTransform has n_embd 32 and n_head 2, but the model has n_embd 32 and n_head_q 4",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(fields, changes, message) -> None:
    given = fields(**changes)
    assert message in str(broken_rule(GPT2LLMConfig, GPT2LLMConfig(**given), given))


def test_enums_by_name_or_value(fields) -> None:
    for spelling in ("MANUAL", "manual"):
        config = GPT2LLMConfig(**fields(attention_implementation=spelling))
        assert config.attention_implementation is AttentionImplementation.MANUAL
    assert GPT2LLMConfig(**fields()).ffn_norm_config.norm_type is LayerNorms.layer_norm


def test_a_slip_in_a_nested_field_is_the_only_complaint(fields) -> None:
    wrong_norm = {"norm_type": "layer_norm", "config": {"normalized_shape": 32, "epz": 1e-5}}
    with pytest.raises(ValidationError) as caught:
        GPT2LLMConfig(**fields(ffn_norm_config=wrong_norm))
    assert [error["loc"][-1] for error in caught.value.errors()] == ["epz"]
    with pytest.raises(ValidationError) as caught:
        GPT2LLMConfig(**fields(ffn_norm_config={"norm_type": "layernorm", "config": {"normalized_shape": 32}}))
    assert [error["loc"][-1] for error in caught.value.errors()] == ["norm_type"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"std": "auto"}, "std auto needs hidden_dim"),
        ({"std": "automatic"}, "std is automatic"),
        ({"std": -1.0}, "negative"),
        ({"weight_init_type": "scaled"}, "scaled needs num_layers"),
    ],
)
def test_composed_initialization_says_what_it_needs(changes, message) -> None:
    fields = {"model_type": "gpt2", "weight_init_type": "plain", "mean": 0.0, "std": 0.02}
    given = fields | changes
    assert message in str(broken_rule(ComposedInitializationConfig, ComposedInitializationConfig(**given), given))


def test_compiled_blocks_keep_their_names_and_results(gpt2, token_ids, monkeypatch) -> None:
    model, plain = gpt2(), gpt2()
    compiled: list[nn.Module] = []
    original = nn.Module.compile

    def compile_eagerly(module: nn.Module, **options: object) -> None:
        assert options == {"fullgraph": True, "options": None}
        compiled.append(module)
        original(module, backend="eager", fullgraph=True)

    monkeypatch.setattr(nn.Module, "compile", compile_eagerly)
    assert compile_blocks(model, ["GPT2Block"], fullgraph=True, debug=False) is model
    assert compiled == list(model.transformer.h.values())
    assert list(model.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(model(token_ids), plain(token_ids))


def test_a_block_name_that_matches_nothing_is_refused(gpt2) -> None:
    with pytest.raises(UserError, match=r"`GPT2Blok`; did you mean `GPT2Block`[^ ]*(.|\n)*GPT2Block \(2\)"):
        compile_blocks(gpt2(), ["GPT2Blok"], fullgraph=True, debug=False)
