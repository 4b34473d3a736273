"""One value explained."""

from __future__ import annotations

import pytest

from modalities.exceptions import UserError
from modalities.inspection.components import describe_component
from modalities.inspection.explaining import explain
from modalities.registry.registry import Registry
from modalities.run import plan_of
from tests.composition.conftest import Composer


def _explained(composer: Composer, path: str, *words: str) -> dict[str, str]:
    composed = composer(*words)
    title, *rows = explain(composed, plan_of(composed), path).splitlines()
    return {"": title} | {name: text.strip() for name, _, text in (row.strip().partition("  ") for row in rows)}


def test_a_field(composer: Composer) -> None:
    rows = _explained(composer, "optimizer.lr", "optimizer.lr=0.5")
    assert rows["value"] == "0.5"
    assert rows["set by"] == "override `optimizer.lr=0.5`"
    assert rows["type"] == "float, at least 0"
    assert rows["default"] == "required"
    assert rows["meaning"].startswith("learning rate")


def test_a_field_that_is_not_given(composer: Composer) -> None:
    rows = _explained(composer, "optimizer.foreach")
    assert rows["default"] == "null"
    assert "value" not in rows


def test_a_value_by_default_with_its_way(composer: Composer) -> None:
    rows = _explained(composer, "checkpoint_saving.every")
    assert (rows["value"], rows["set by"]) == ("4", "default of checkpoint_saving/dcp.every")
    assert "exp.yaml:5:38" in rows["through"]


def test_a_setting_and_who_reads_it(composer: Composer) -> None:
    rows = _explained(composer, "settings.paths.data")
    assert rows["used by"] == "train_dataset.raw_data_path"
    rows = _explained(composer, "step_profile.sequence_length")
    assert rows["meaning"] == "tokens per sample"
    assert "model_raw.sequence_length (by default)" in rows["used by"]


def test_a_component_and_who_needs_it(composer: Composer) -> None:
    rows = _explained(composer, "model")
    assert rows["is"].startswith("model/model_initialized: ")
    assert set(rows["used by"].split(", ")) == {"optimizer", "app_state", "gradient_clipper", "mfu_calculator"}


def test_a_slot_that_is_empty_tells_its_variants(composer: Composer) -> None:
    assert "wandb" in _explained(composer, "evaluation_subscriber")["variants"]


def test_every_leaf_can_be_explained(composer: Composer) -> None:
    composed = composer()
    plan = plan_of(composed)
    for path, _ in composed.tree.leaves():
        assert explain(composed, plan, ".".join(map(str, path)))


def test_a_path_that_is_not_there_names_the_nearest(composer: Composer) -> None:
    composed = composer()
    with pytest.raises(UserError, match="did you mean `lr`"):
        explain(composed, plan_of(composed), "optimizer.lrr")


@pytest.mark.parametrize("spec", list(Registry.standard()), ids=lambda spec: spec.name)
def test_every_component_can_be_described(spec) -> None:  # type: ignore[no-untyped-def]
    text = describe_component(Registry.standard(), spec.kind, spec.variant)
    assert spec.summary in text
    for name in spec.config.model_fields:
        assert f"    {name}" in text
    assert f"component_key: {spec.kind}" in text
