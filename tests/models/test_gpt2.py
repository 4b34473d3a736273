from __future__ import annotations

import pytest
import torch

from modalities.exceptions import UserError
from modalities.models.rotary import RotaryTransform

ROTARY = {"type_hint": "RotaryTransform", "config": {"n_embd": 32, "n_head": 4, "seq_length_dim": -2, "base_freq": 100}}
PYTORCH_NORM = {"norm_type": "pytorch_rms_norm", "config": {"normalized_shape": 32}}


def test_names_and_shapes_of_swiglu_with_rotary(gpt2) -> None:
    shapes = {name: list(tensor.shape) for name, tensor in gpt2(n_layer=1).state_dict().items()}
    assert shapes == {
        "transformer.wte.weight": [61, 32],
        "transformer.h.0.attention_norm.weight": [32],
        "transformer.h.0.attention_norm.bias": [32],
        "transformer.h.0.ffn_norm.weight": [32],
        "transformer.h.0.ffn_norm.bias": [32],
        "transformer.h.0.attn.q_attn.weight": [32, 32],
        "transformer.h.0.attn.q_attn.bias": [32],
        "transformer.h.0.attn.k_attn.weight": [16, 32],
        "transformer.h.0.attn.k_attn.bias": [16],
        "transformer.h.0.attn.v_attn.weight": [16, 32],
        "transformer.h.0.attn.v_attn.bias": [16],
        "transformer.h.0.attn.c_proj.weight": [32, 32],
        "transformer.h.0.attn.c_proj.bias": [32],
        "transformer.h.0.attn.qkv_transforms.0.inv_freq": [4],
        "transformer.h.0.mlp.W.weight": [32, 32],
        "transformer.h.0.mlp.W.bias": [32],
        "transformer.h.0.mlp.V.weight": [32, 32],
        "transformer.h.0.mlp.V.bias": [32],
        "transformer.h.0.mlp.W_2.weight": [32, 32],
        "transformer.h.0.mlp.W_2.bias": [32],
        "transformer.lm_head_norm.weight": [32],
        "transformer.lm_head_norm.bias": [32],
        "transformer.lm_head.weight": [61, 32],
    }


def test_names_of_gelu_with_absolute_positions_and_norms_of_queries_and_keys(gpt2) -> None:
    attention = {"qkv_transforms": [], "qk_norm_config": {"norm_type": "rms_norm", "config": {"ndim": 8}}}
    model = gpt2(n_layer=1, activation_type="gelu", poe_type="ABSOLUTE", bias=False, attention_config=attention)
    names = {name for name, _ in model.named_parameters()}
    assert names >= {
        "transformer.wpe.weight",
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.h.0.mlp.c_proj.weight",
        "transformer.h.0.attn.q_norm.weight",
        "transformer.h.0.attn.k_norm.bias",
    }
    assert "transformer.h.0.attn.q_attn.bias" not in names


VARIANTS = {
    "rotary": {},
    "absolute": {"poe_type": "ABSOLUTE", "activation_type": "gelu"},
    "qk_norm": {
        "attention_config": {
            "qkv_transforms": [ROTARY],
            "qk_norm_config": {"norm_type": "rms_norm", "config": {"ndim": 8}},
        }
    },
    "one key-value head": {"n_head_kv": 1, "attention_norm_config": PYTORCH_NORM},
    "all key-value heads": {"n_head_kv": 4, "bias": False},
}


@pytest.mark.parametrize("attention_implementation", ["manual", "pytorch_flash"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_later_tokens_change_nothing_before_them(gpt2, token_ids, variant, attention_implementation) -> None:
    model = gpt2(attention_implementation=attention_implementation, **VARIANTS[variant])
    before = model({"input_ids": token_ids})["logits"]
    changed = token_ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 61
    after = model({"input_ids": changed})["logits"]
    torch.testing.assert_close(after[:, :7], before[:, :7])
    assert not torch.allclose(after[:, 7:], before[:, 7:])


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_attentions_agree(gpt2, token_ids, variant) -> None:
    by_hand = gpt2(attention_implementation="manual", **VARIANTS[variant])
    fused = gpt2(attention_implementation="pytorch_flash", **VARIANTS[variant])
    torch.testing.assert_close(by_hand(token_ids), fused(token_ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention_implementation", ["manual", "pytorch_flash"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("pieces", [[12], [5, 1, 1, 5], [1] * 12])
def test_decoding_with_a_cache_equals_the_full_forward(
    gpt2, token_ids, variant, attention_implementation, pieces
) -> None:
    model = gpt2(attention_implementation=attention_implementation, **VARIANTS[variant])
    cache = model.make_cache()
    logits = torch.cat([model(piece, cache=cache) for piece in token_ids.split(pieces, dim=1)], dim=1)
    assert cache.length == 12
    torch.testing.assert_close(logits, model(token_ids), atol=1e-5, rtol=1e-5)


def test_a_cache_can_be_used_again(gpt2, token_ids) -> None:
    model = gpt2()
    cache = model.make_cache()
    first = model(token_ids, cache=cache)
    cache.reset()
    assert torch.equal(model(token_ids, cache=cache), first)


def test_grouped_queries_equal_repeated_key_value_heads(gpt2, token_ids) -> None:
    grouped, full = gpt2(n_head_kv=2), gpt2(n_head_kv=4)
    state = grouped.state_dict()
    for name in state:
        if ".k_attn." in name or ".v_attn." in name:
            state[name] = state[name].unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(full(token_ids), grouped(token_ids), atol=1e-5, rtol=1e-5)


def test_tied_weights_are_one_parameter(gpt2, token_ids) -> None:
    model = gpt2(use_weight_tying=True)
    assert model.transformer.lm_head.weight is model.transformer.wte.weight
    assert "transformer.lm_head.weight" not in dict(model.named_parameters())
    model(token_ids).sum().backward()


def test_dropout_acts_in_training_only(gpt2, token_ids) -> None:
    for attention_implementation in ("manual", "pytorch_flash"):
        model = gpt2(dropout=0.5, attention_implementation=attention_implementation)
        assert not torch.equal(model(token_ids), model(token_ids))
        model.eval()
        assert torch.equal(model(token_ids), model(token_ids))


def test_a_seed_makes_the_model_and_leaves_the_global_generator_alone(gpt2, token_ids) -> None:
    torch.manual_seed(1)
    first = gpt2(seed=5)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), drawn)
    assert torch.equal(gpt2(seed=5)(token_ids), first(token_ids))


@pytest.mark.parametrize("poe_type", ["ABSOLUTE", "NOPE"])
def test_a_sequence_that_is_too_long_is_refused(gpt2, poe_type) -> None:
    model = gpt2(poe_type=poe_type)
    with pytest.raises(UserError, match=r"17 tokens .* sequence_length of 16"):
        model(torch.zeros(1, 17, dtype=torch.long))
    cache = model.make_cache()
    model(torch.zeros(1, 16, dtype=torch.long), cache=cache)
    with pytest.raises(UserError, match="17 tokens"):
        model(torch.zeros(1, 1, dtype=torch.long), cache=cache)


def test_flash_attn_must_be_installed(gpt2) -> None:
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match="dao_flash"):
            gpt2(attention_implementation="dao_flash")


def test_rotation_depends_on_distances_only() -> None:
    transform = RotaryTransform(n_embd=8, n_head=1, base_freq=10000)
    query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def product(query_position: int, key_position: int) -> torch.Tensor:
        rotated_query = transform(query, query, query, query_position)[0]
        return (rotated_query * transform(key, key, key, key_position)[1]).sum()

    torch.testing.assert_close(product(3, 1), product(103, 101), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(product(3, 1), product(4, 1))


def test_rotation_keeps_its_precision_in_a_bf16_model() -> None:
    exact, rounded = RotaryTransform(64, 1, 10000), RotaryTransform(64, 1, 10000).to(torch.bfloat16)
    inputs = torch.randn(1, 1, 1, 64).bfloat16()
    torch.testing.assert_close(rounded(inputs, inputs, inputs, 4000)[0], exact(inputs, inputs, inputs, 4000)[0])
