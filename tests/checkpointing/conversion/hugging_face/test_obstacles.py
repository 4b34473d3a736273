"""What no architecture expresses is refused, and the field that stands in the way is named."""

from __future__ import annotations

from typing import Any

import pytest

from modalities.checkpointing.conversion.hugging_face.obstacles import choose_architecture
from modalities.exceptions import CheckpointError
from tests.checkpointing.conversion.hugging_face.samples import (
    CLASSIC,
    NO_POSITIONS,
    ROTARY_ATTENTION,
    WIDTH,
    layer_norm,
    norms,
    rms_norm,
    settings_of,
)

SHIFTED = {"norm_type": "rms_norm", "config": {"ndim": WIDTH, "bias": True}}
BARE = {
    "norm_type": "layer_norm",
    "config": {"normalized_shape": WIDTH, "eps": 1e-5, "elementwise_affine": False, "bias": False},
}
QUERY_NORM = {**ROTARY_ATTENTION, "qk_norm_config": rms_norm(8)}
TWICE = {"qkv_transforms": ROTARY_ATTENTION["qkv_transforms"] * 2}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (norms(SHIFTED), "model_raw.attention_norm_config.config.bias is true; it needs false"),
        (
            {"ffn_norm_config": rms_norm(eps=1e-6)},
            "model_raw.ffn_norm_config.config.eps is 1e-06; it needs 1e-05, as attention_norm_config",
        ),
        ({"ffn_norm_config": layer_norm()}, "model_raw.ffn_norm_config.norm_type is layer_norm; it needs rms_norm"),
        ({"poe_type": "ABSOLUTE"}, "model_raw.poe_type is ABSOLUTE; it needs NOPE"),
        (
            {"attention_config": TWICE},
            "model_raw.attention_config.qkv_transforms is a list with 2 RotaryTransform; it needs 1",
        ),
        ({"attention_config": QUERY_NORM, "bias": True}, "model_raw.attention_config.qk_norm_config is a pytorch_rms"),
        ({**norms(layer_norm()), "bias": True}, "model_raw.bias is true; it needs false"),
        ({**CLASSIC, "n_head_kv": 2}, "model_raw.n_head_kv is 2; it needs 4, as n_head_q"),
        ({**CLASSIC, "activation_type": "swiglu"}, "model_raw.activation_type is swiglu; it needs gelu"),
        ({**CLASSIC, "attention_config": ROTARY_ATTENTION}, "model_raw.poe_type is ABSOLUTE; it needs NOPE"),
        ({**norms(BARE)}, "model_raw.lm_head_norm_config.config.elementwise_affine is false; it needs true"),
        ({**norms(layer_norm()), "attention_config": NO_POSITIONS}, "model_raw.attention_config.qkv_transforms"),
    ],
)
def test_the_field_in_the_way_is_named(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        choose_architecture(settings_of(**changes))
    assert told in str(caught.value)
    assert "docs/checkpointing.md" in str(caught.value)
