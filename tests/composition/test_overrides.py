"""Hydra's words, on short and canonical nodes alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modalities.config.yaml_loader import load_yaml
from modalities.inspection.showing import show
from modalities.run import RunRequest, compose, plan_of
from modalities.testing.tiny import tiny_config, write_config
from tests.composition.conftest import Composer
from tests.faults.cases import BASE


def _value(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    return tree


@pytest.mark.parametrize(
    ("word", "path", "value"),
    [
        ("optimizer.lr=3e-4", "optimizer.config.lr", 3e-4),
        ("optimizer.config.lr=3e-4", "optimizer.config.lr", 3e-4),
        ("settings.training_target.num_target_steps=50", "settings.training_target.num_target_steps", 50),
        ("training_target.num_target_steps=50", "settings.training_target.num_target_steps", 50),
        ("model.n_layer=4", "model_raw.config.n_layer", 4),
        ("model.block_names=[SwiGLU]", "sharded_model.config.block_names", ["SwiGLU"]),
        ("app_state.model.n_layer=3", "model_raw.config.n_layer", 3),
        ("optimizer.betas.0=0.8", "optimizer.config.betas", [0.8, 0.95]),
        ("+sharded_model.block_names.1=SwiGLU", "sharded_model.config.block_names", ["GPT2Block", "SwiGLU"]),
        ("optimizer.betas=[0.8,0.9]", "optimizer.config.betas", [0.8, 0.9]),
        ("optimizer.foreach=true", "optimizer.config.foreach", True),
        ("optimizer.foreach=null", "optimizer.config.foreach", None),
        ("++optimizer.eps=1e-6", "optimizer.config.eps", 1e-6),
        ("+seed=7", "settings.seed", 7),
        ("seed=7", "settings.seed", 7),
        ("train_dataloader.dataloader_tag='a, b'", "train_dataloader.config.dataloader_tag", "a, b"),
        ('train_dataloader.dataloader_tag="3"', "train_dataloader.config.dataloader_tag", "3"),
        ("train_dataloader.dataloader_tag=str(3)", "train_dataloader.config.dataloader_tag", "3"),
        ("optimizer.lr=float(1)", "optimizer.config.lr", 1.0),
        ("optimizer={lr:0.5,eps:1e-7}", "optimizer.config.lr", 0.5),
        ("optimizer.config={lr:0.5}", "optimizer.config.lr", 0.5),
        ("optimizer={config:{lr:0.5}}", "optimizer.config.lr", 0.5),
        ("optimizer={variant_key:adam,lr:0.5}", "optimizer.variant_key", "adam"),
        ("optimizer=adam", "optimizer.config.lr", 0.01),
        ("optimizer.lr=${gradient_clipper.max_norm}", "optimizer.config.lr", 1.0),
        (
            "optimizer.wrapped_model=${ref:sharded_model}",
            "optimizer.config.wrapped_model.instance_key",
            "sharded_model",
        ),
        ("+evaluation_subscriber=rich", "evaluation_subscriber.config.num_ranks", 1),
        ("evaluation_subscriber=to_disc", "evaluation_subscriber.variant_key", "to_disc"),
        ("eval_dataloaders=[${ref:train_dataloader}]", "eval_dataloaders.0.instance_key", "train_dataloader"),
        ("x-mine.a.b=1", "x-mine.a.b", 1),
        ("+user.note=hello", "user.note", "hello"),
        ("model_raw.lm_head_norm_config.config.ndim=8", "model_raw.config.lm_head_norm_config.config.ndim", 8),
    ],
)
def test_a_word_sets_its_value(composer: Composer, word: str, path: str, value: Any) -> None:
    words = (word if not word.startswith("x-") else f"+{word}",)
    found = _value(composer(*words).tree.plain(), path)
    assert found == value
    assert type(found) is type(value)


def test_the_place_of_an_overridden_value_is_the_word(composer: Composer) -> None:
    node = composer("optimizer.lr=3e-4").tree.get(("optimizer", "config", "lr"))
    assert node is not None
    assert str(node.place) == "override `optimizer.lr=3e-4`"


def test_a_number_replaces_a_computed_one(composer: Composer) -> None:
    computed = "{component_key:number_conversion,variant_key:num_tokens_from_num_steps}"
    word = f"training_target.num_target_tokens={computed}"
    assert composer(word).tree.plain()["settings"]["training_target"]["num_target_tokens"]["config"]["dp_degree"] == 1
    both = composer(word, "training_target.num_target_tokens=256")
    assert both.tree.plain()["settings"]["training_target"]["num_target_tokens"] == 256


def test_words_work_in_any_order(composer: Composer) -> None:
    one = show(composer("optimizer=adam", "optimizer.lr=0.5"))
    assert one == show(composer("optimizer.lr=0.5", "optimizer=adam"))


def test_another_variant_keeps_what_both_have_and_tells_the_rest(composer: Composer) -> None:
    text = (
        BASE
        + "lr_scheduler: {component_key: scheduler, variant_key: step_lr, step_size: 2, gamma: 0.5, last_epoch: -1}\n"
    )
    composed = composer("lr_scheduler=dummy_lr", text=text)
    assert composed.tree.plain()["lr_scheduler"]["config"] == {
        "optimizer": {"instance_key": "optimizer", "pass_type": "BY_REFERENCE"}
    }
    (note,) = [fault for fault in composed.faults if fault.severity == "note"]
    assert "has no step_size, gamma, last_epoch; keeps nothing" in note.message
    assert [str(place) for _, place in note.related] == ["exp.yaml:74:64", "exp.yaml:74:78", "exp.yaml:74:90"]
    assert not plan_of(composed).errors


def test_a_saving_keeps_its_numbers_when_it_is_written_shorter(tmp_path: Path) -> None:
    tree = tiny_config(tmp_path)
    file = write_config(tree, tmp_path / "exp.yaml")
    before = tree["checkpoint_saving"]["config"]
    composed = compose(RunRequest(file, overrides=("checkpoint_saving=dcp",)))
    after = composed.tree.plain()["checkpoint_saving"]["config"]
    assert after["k"] == before["checkpoint_saving_strategy"]["config"]["k"]
    assert (
        composed.unresolved.plain()["checkpoint_saving"]["config"]["checkpoint_path"]
        == (before["checkpoint_saving_execution"]["config"]["checkpoint_path"])
    )


@pytest.mark.parametrize(
    ("words", "gone"),
    [(["~gradient_clipper"], "gradient_clipper"), (["~mfu_calculator=gpt2"], None), (["~optimizer.foreach"], None)],
)
def test_removing(composer: Composer, words: list[str], gone: str | None) -> None:
    composed = composer(*words)
    if gone is None:
        assert "override-no-target" in [fault.code for fault in composed.faults]
    else:
        assert gone not in composed.tree.value
        assert not plan_of(composed).errors


def test_without_a_clipper_nothing_is_clipped(tmp_path: Path) -> None:
    """The run goes on and still logs the norm."""
    import json

    from modalities.run import run

    tree = tiny_config(tmp_path, num_steps=2)
    file = write_config(tree, tmp_path / "exp.yaml")
    run(RunRequest(file, experiments_root=tmp_path, experiment_id="free", overrides=("~gradient_clipper",)))
    lines = [json.loads(line) for line in (tmp_path / "free" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["metrics"]["grad norm avg"] > 0


def test_overrides_are_kept_and_the_resolved_config_runs_alone(tmp_path: Path) -> None:
    import json

    from modalities.run import run

    file = write_config(tiny_config(tmp_path, num_steps=2), tmp_path / "exp.yaml")
    words = ("optimizer.lr=0.5", "optimizer=adam")
    run(RunRequest(file, experiments_root=tmp_path, experiment_id="one", overrides=words))
    assert json.loads((tmp_path / "one" / "overrides.json").read_text()) == list(words)
    resolved = tmp_path / "one" / "config.resolved.yaml"
    assert load_yaml(resolved, []).plain()["optimizer"]["config"]["lr"] == 0.5
    run(RunRequest(resolved, experiments_root=tmp_path, experiment_id="two"))
    first, second = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("one", "two"))
    losses = [[json.loads(line)["losses"] for line in text.splitlines()] for text in (first, second)]
    assert losses[0] == losses[1]
