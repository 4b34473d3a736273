"""What is not given comes from where the field says, and from nowhere else."""

from __future__ import annotations

import pytest

from modalities.run import plan_of
from tests.composition.conftest import Composer
from tests.faults.cases import BASE


def test_a_saving_by_its_name_alone_is_complete(composer: Composer) -> None:
    saving = composer().tree.plain()["checkpoint_saving"]
    assert saving["config"] == {
        "every": 4,
        "checkpoint_path": "experiments/run-1/checkpoints",
        "global_rank": 0,
        "experiment_id": "run-1",
    }
    assert composer().tree.plain()["checkpoint_loading"]["variant_key"] == "dcp"


def test_the_first_place_that_is_there_wins(composer: Composer) -> None:
    text = BASE.replace("  paths: {data: train.pbin}", "  paths: {data: train.pbin, checkpoint_saving_path: here}")
    composed = composer(text=text)
    assert composed.tree.plain()["checkpoint_saving"]["config"]["checkpoint_path"] == "here"
    node = composed.tree.get(("checkpoint_saving", "config", "checkpoint_path"))
    assert node is not None
    assert node.via[0][0] == "${settings.paths.checkpoint_saving_path}"
    assert str(node.place) == "default of checkpoint_saving/dcp.checkpoint_path"


def test_what_is_given_is_kept(composer: Composer) -> None:
    saving = composer("checkpoint_saving={variant_key:dcp,k:3,checkpoint_path:p}").tree.plain()["checkpoint_saving"]
    assert (saving["config"]["k"], saving["config"]["checkpoint_path"]) == (3, "p")


def test_components_of_the_agreed_names_are_shared(composer: Composer) -> None:
    plan = plan_of(composer())
    model = plan.components[("optimizer",)].fields["wrapped_model"]
    assert model.path == ("model",)
    assert plan.components[("app_state",)].fields["model"].path == ("model",)
    assert plan.components[("gradient_clipper",)].fields["device_mesh"].path == ("device_mesh",)


def test_the_app_state_s_model_is_the_trained_one_whatever_its_name(composer: Composer) -> None:
    text = BASE.replace("\nmodel:\n", "\ninitialized:\n").replace(
        "app_state: raw", 'app_state: {variant_key: raw, model: "${ref:initialized}"}'
    )
    plan = plan_of(composer(text=text))
    assert not plan.errors
    assert plan.components[("optimizer",)].fields["wrapped_model"].path == ("initialized",)


FSDP1 = """
initialized:
  component_key: model
  variant_key: model_initialized
  model: ${ref:model_raw}
  model_initializer: {variant_key: composed, model_type: gpt2, weight_init_type: plain, mean: 0.0, std: 0.02}
model:
  component_key: model
  variant_key: compiled
  block_names: [SwiGLU]
  model:
    component_key: model
    variant_key: fsdp1_wrapped
    model: ${ref:initialized}
    sync_module_states: true
    mixed_precision_settings: BF_16
    sharding_strategy: SHARD_GRAD_OP
    block_names: [GPT2Block]
gradient_clipper: {variant_key: fsdp1, norm_type: P2_NORM, max_norm: 1.0}
"""


@pytest.fixture
def fsdp1_text() -> str:
    start, end = BASE.index("sharded_model:"), BASE.index("optimizer:")
    without = BASE[:start] + BASE[end:]
    return without.replace("gradient_clipper: {variant_key: fsdp2, norm_type: P2_NORM, max_norm: 1.0}\n", "") + FSDP1


def test_saving_as_fsdp1_loads_as_fsdp1_with_the_model_s_own_settings(composer: Composer, fsdp1_text: str) -> None:
    """Through whatever wraps the FSDP1 model; a wrapper's own field of that name comes first."""
    composed = composer("checkpoint_saving=fsdp1", text=fsdp1_text)
    assert not plan_of(composed).errors
    loading = composed.tree.plain()["checkpoint_loading"]
    assert loading["variant_key"] == "fsdp1"
    assert loading["config"]["mixed_precision_settings"] == "BF_16"
    assert loading["config"]["sharding_strategy"] == "SHARD_GRAD_OP"


def test_a_loading_that_is_given_is_kept(composer: Composer, fsdp1_text: str) -> None:
    words = ("checkpoint_saving=fsdp1", "+checkpoint_loading={variant_key:fsdp1,block_names:[SwiGLU]}")
    loading = composer(*words, text=fsdp1_text).tree.plain()["checkpoint_loading"]["config"]
    assert loading["block_names"] == ["SwiGLU"]
    assert loading["sharding_strategy"] == "SHARD_GRAD_OP"


def test_what_can_not_be_filled_is_told_with_its_places(composer: Composer) -> None:
    text = BASE.replace("    sequence_length: 16\n", "")
    errors = plan_of(composer(text=text)).errors
    assert [fault.message for fault in errors] == ["the config needs `settings.step_profile.sequence_length`"]
