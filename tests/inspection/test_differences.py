"""Configs compared in meaning."""

from __future__ import annotations

from modalities.inspection.differences import diff_text, differences
from modalities.run import RunRequest, compose
from modalities.testing.tiny import tiny_config, write_config
from tests.composition.conftest import Composer
from tests.faults.cases import BASE


def test_layout_and_form_do_not_matter(composer: Composer) -> None:
    text = BASE.replace("loss_fn: clm_cross_entropy_loss\n", "") + (
        "# a remark\nloss_fn:\n  component_key: loss\n  variant_key: clm_cross_entropy_loss\n  config:\n"
        "    prediction_key: logits\n    target_key: ${settings.referencing_keys.target_key}\n"
    )
    assert differences(composer(), composer(text=text)) == []


def test_a_default_spelt_out_is_no_difference(composer: Composer) -> None:
    text = BASE.replace("checkpoint_saving: dcp", "checkpoint_saving: {variant_key: dcp, k: -1}")
    assert differences(composer(), composer("+settings.seed=42", "+optimizer.foreach=null", text=text)) == []


def test_a_field_s_other_name_is_no_difference(composer: Composer) -> None:
    clipper = 'gradient_clipper: {variant_key: fsdp2, wrapped_model: "${ref:model}"'
    assert differences(composer(), composer(text=BASE.replace("gradient_clipper: {variant_key: fsdp2", clipper))) == []


def test_an_enum_s_other_spelling_is_no_difference(composer: Composer) -> None:
    assert differences(composer(), composer("model.attention_implementation=PYTORCH_FLASH")) == []


def test_values_variants_and_entries_are_told_with_their_places(composer: Composer) -> None:
    words = ("optimizer=adam", "optimizer.lr=0.5", "~gradient_clipper", "+evaluation_subscriber=dummy")
    lines = diff_text(differences(composer(), composer(*words))).splitlines()
    assert "~ optimizer: optimizer/adam_w (exp.yaml:62:16) -> optimizer/adam (override `optimizer=adam`)" in lines
    assert "~ optimizer.lr: 0.01 (exp.yaml:64:9) -> 0.5 (override `optimizer.lr=0.5`)" in lines
    assert "- gradient_clipper = gradient_clipper/fsdp2 (exp.yaml:70:33)" in lines
    assert "+ evaluation_subscriber = results_subscriber/dummy (override `+evaluation_subscriber=dummy`)" in lines


def test_numbers_and_truth_values_are_not_the_same(composer: Composer) -> None:
    (found,) = differences(composer("+user.x=1"), composer("+user.x=true")) or [None]
    assert found is None  # the user's own entries are not compared
    changed = differences(composer(), composer("model.bias=1"))
    assert [d.path for d in changed] == ["model_raw.bias"]


def test_the_run_s_own_names_are_no_difference(tmp_path) -> None:  # type: ignore[no-untyped-def]
    one = write_config(tiny_config(tmp_path), tmp_path / "one.yaml")
    two = write_config(tiny_config(tmp_path), tmp_path / "two.yaml")
    assert differences(compose(RunRequest(one)), compose(RunRequest(two))) == []
