"""Three ways to write a component mean the same."""

from __future__ import annotations

import pytest

from modalities.run import plan_of
from tests.composition.conftest import Composer
from tests.faults.cases import BASE

LOSS = "loss_fn: clm_cross_entropy_loss\n"
CLIPPER = "gradient_clipper: {variant_key: fsdp2, norm_type: P2_NORM, max_norm: 1.0}\n"


def test_a_variant_s_name_is_a_component(composer: Composer) -> None:
    tree = composer().tree.plain()
    assert tree["loss_fn"] == {
        "component_key": "loss",
        "variant_key": "clm_cross_entropy_loss",
        "config": {"target_key": "y", "prediction_key": "logits"},
    }


@pytest.mark.parametrize(
    "written",
    [
        "gradient_clipper: {variant_key: fsdp2, norm_type: P2_NORM, max_norm: 1.0}\n",
        "gradient_clipper: {component_key: gradient_clipper, variant_key: fsdp2, norm_type: P2_NORM, max_norm: 1.0}\n",
        "gradient_clipper: {variant_key: fsdp2, config: {norm_type: P2_NORM, max_norm: 1.0}}\n",
        "gradient_clipper:\n  component_key: gradient_clipper\n  variant_key: fsdp2\n  config:\n"
        "    norm_type: P2_NORM\n    max_norm: 1.0\n",
    ],
)
def test_all_forms_expand_to_one(composer: Composer, written: str) -> None:
    entry = composer(text=BASE.replace(CLIPPER, written)).tree.plain()["gradient_clipper"]
    assert entry["component_key"] == "gradient_clipper"
    assert {key: entry["config"][key] for key in ("norm_type", "max_norm")} == {"norm_type": "P2_NORM", "max_norm": 1.0}


def test_config_null_is_no_fields(composer: Composer) -> None:
    written = "loss_fn: {component_key: loss, variant_key: clm_cross_entropy_loss, config: null}\n"
    composed = composer(text=BASE.replace(LOSS, written))
    assert not plan_of(composed).errors


def test_a_variant_may_be_named_by_an_interpolation(composer: Composer) -> None:
    text = BASE.replace("checkpoint_saving: dcp", "checkpoint_saving: ${user.saving}\nuser: {saving: dcp}")
    composed = composer(text=text)
    assert composed.tree.plain()["checkpoint_saving"]["config"]["every"] == 4
    assert not plan_of(composed).errors
    text = BASE.replace("variant_key: adam_w", 'variant_key: "${user.which}"') + "user: {which: adam}\n"
    assert composer(text=text).tree.plain()["optimizer"]["variant_key"] == "adam"


def test_references_reach_into_plain_mappings_and_lists(composer: Composer) -> None:
    text = BASE.replace("  model: ${ref:model_raw}", "  model: ${ref:parts.models.0}") + (
        "parts:\n  models:\n    - ${ref:model_raw}\n"
    )
    plan = plan_of(composer(text=text))
    assert not plan.errors
    sharded = plan.components[("sharded_model",)]
    assert sharded.fields["model"].path == ("model_raw",)


def test_a_component_in_a_mapping_is_shared(composer: Composer) -> None:
    text = BASE.replace(
        "    dp_degree: 1\n",
        "    dp_degree: {component_key: number_conversion, variant_key: parallel_degree,"
        " parallelism_methods: [dp_shard]}\n",
    )
    plan = plan_of(
        composer(
            "~settings.training_target.num_target_tokens",
            "+settings.training_target.num_target_tokens="
            "{component_key:number_conversion,variant_key:num_tokens_from_num_steps}",
            text=text,
        )
    )
    assert not plan.errors
    tokens = plan.components[("settings", "training_target", "num_target_tokens")]
    assert tokens.fields["dp_degree"].path == ("settings", "step_profile", "dp_degree")
    degrees = [c for c in plan.build_order() if c.spec.variant == "parallel_degree"]
    assert len(degrees) == 1


def test_older_names_load_with_a_warning(composer: Composer) -> None:
    text = BASE.replace(
        "attention_norm_config: {norm_type: rms_norm, config: {ndim: 16}}",
        "attention_norm: {component_key: layer_norm, variant_key: rms_norm, config: {ndim: 16}}",
    )
    text = text.replace("variant_key: fsdp2_wrapped", "variant_key: fsdp2_wrapped")
    plan = plan_of(composer(text=text))
    assert not plan.errors
    assert [(f.code, f.severity, f.place.line) for f in plan.faults] == [("renamed", "warning", 46)]
    assert plan.components[("model_raw",)].fields["attention_norm_config"] == {
        "norm_type": "rms_norm",
        "config": {"ndim": 16},
    }


def test_an_older_variant_loads_with_a_warning(composer: Composer) -> None:
    wrapper = (
        "  variant_key: fsdp_wrapped\n  sync_module_states: true\n  sharding_strategy: FULL_SHARD\n"
        "  model: ${ref:model_raw}\n  mixed_precision_settings: NO_MIXED_PRECISION\n"
    )
    start = BASE.index("  variant_key: fsdp2_wrapped")
    text = BASE[:start] + wrapper + BASE[BASE.index("  block_names") :]
    text = text.replace("gradient_clipper: {variant_key: fsdp2", "gradient_clipper: {variant_key: fsdp1")
    plan = plan_of(composer(text=text))
    assert not plan.errors
    assert plan.components[("sharded_model",)].spec.variant == "fsdp1_wrapped"
    assert "fsdp1_wrapped" in next(f for f in plan.faults if f.code == "renamed").message


def test_entries_of_one_s_own_are_left_alone(composer: Composer) -> None:
    composed = composer(text=BASE + "user: {optimizer: dcp, x: {variant_key: nothing}}\nx-note: [a, b]\n")
    assert composed.tree.plain()["user"] == {"optimizer": "dcp", "x": {"variant_key": "nothing"}}
    assert plan_of(composed).faults == []


def test_names_that_interpolations_read_may_stand_in_settings(composer: Composer) -> None:
    text = BASE.replace("  paths: {data", "  mine: {lr: 0.02}\n  paths: {data").replace(
        "lr: 0.01", "lr: ${settings.mine.lr}"
    )
    plan = plan_of(composer(text=text))
    assert plan.faults == []
    assert plan.components[("optimizer",)].fields["lr"] == 0.02
