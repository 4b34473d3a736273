"""Going on with a config that is no longer the checkpoint's: what may change, what must be allowed, what cannot."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from modalities.checkpointing.discovery import Checkpoint, checkpoints_in, locate_checkpoint
from modalities.checkpointing.manifest import Manifest, read_manifest
from modalities.checkpointing.reading.sources import open_source
from modalities.exceptions import CheckpointError, UserError
from modalities.run import RunRequest, run
from modalities.testing.ranks import run_on_ranks
from modalities.testing.tiny import component, tiny_config, write_config, write_tokens

Tree = dict[str, Any]


def _run(config: Path, experiment_id: str, resume: str = "none", **words: Any) -> int:
    return run(RunRequest(config, config.parent, experiment_id, resume, **words)).progress.num_seen_steps


def _written(tree: Tree, folder: Path, change: Callable[[Tree], object] = lambda _: None) -> Path:
    changed = json.loads(json.dumps(tree))
    change(changed)
    return write_config(changed, folder / "config.yaml")


def _checkpoint(folder: Path, step: int) -> Checkpoint:
    return next(c for c in checkpoints_in(folder / "checkpoints") if c.progress.num_seen_steps == step)


def _results(run_folder: Path) -> list[Any]:
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [(line["num_train_steps_done"], line["losses"], line["metrics"]) for line in lines]


def _rates(run_folder: Path) -> dict[int, float]:
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return {
        line["num_train_steps_done"]: line["throughput_metrics"]["lr mean"]
        for line in lines
        if line["dataloader_tag"] == "train"
    }


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Tree, Path]:
    """A run of 8 steps, and where its checkpoint of step 4 is."""
    tree = tiny_config(tmp_path)
    _run(_written(tree, tmp_path), "begun")
    return tree, _checkpoint(tmp_path / "begun", 4).path


def _rename_entries(tree: Tree) -> None:
    """Other names for entries, in another order; one is written where it is needed."""
    tree["the_optimizer"] = tree.pop("optimizer")
    text = json.dumps(tree).replace('"instance_key": "optimizer"', '"instance_key": "the_optimizer"')
    tree.clear()
    tree.update(dict(reversed(json.loads(text).items())))
    loader = tree["train_dataloader"]["config"]
    loader["batch_sampler"]["config"]["sampler"]["config"].pop("dataset")
    loader["batch_sampler"]["config"]["sampler"]["config"]["dataset"] = {
        "instance_key": "train_dataset",
        "pass_type": "BY_REFERENCE",
    }


def _more_workers_and_logs(tree: Tree) -> None:
    tree["train_dataloader"]["config"]["num_workers"] = 2
    tree["settings"]["intervals"]["checkpointing_interval_in_steps"] = 3
    tree["eval_dataloaders"] = []
    tree["settings"]["seed"] = 42


@pytest.mark.parametrize("change", [_rename_entries, _more_workers_and_logs])
def test_what_has_nothing_to_do_with_the_training_changes_freely(
    begun: tuple[Tree, Path], tmp_path: Path, change: Callable[[Tree], None], caplog: pytest.LogCaptureFixture
) -> None:
    tree, at_4 = begun
    caplog.set_level(logging.INFO)
    config = _written(tree, tmp_path, change)
    assert _run(config, "on", str(at_4)) == 8
    assert "changed since" not in caplog.text
    expected = [result for result in _results(tmp_path / "begun") if result[0] > 4 and result[2]]
    assert [result for result in _results(tmp_path / "on") if result[2]] == expected


def _set(path: str, value: Any) -> Callable[[Tree], None]:
    def change(tree: Tree) -> None:
        node: Any = tree
        *parents, last = path.split(".")
        for name in parents:
            node = node[name]
        node[last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("optimizer.config.lr", 1e-3, "optimizer.lr  0.01 -> 0.001"),
        ("optimizer.config.betas", [0.8, 0.95], "optimizer.betas  [0.9, 0.95] -> [0.8, 0.95]"),
        ("lr_scheduler.config.max_lr", 2e-2, "lr_scheduler.max_lr  0.01 -> 0.02"),
        ("model_raw.config.dropout", 0.1, "model_raw.dropout  0.0 -> 0.1"),
        (
            "train_dataloader.config.batch_sampler.config.sampler.config.seed",
            4,
            "train_dataloader.batch_sampler.sampler.seed  3 -> 4",
        ),
        (
            "gradient_clipper.config.max_norm",
            2.0,
            "gradient_clipper.max_norm  1.0 -> 2.0",
        ),
        (
            "model_raw.config.attention_norm_config.config.epsilon",
            1e-3,
            "model_raw.attention_norm_config.config.epsilon  1.0e-06 -> 0.001",
        ),
    ],
)
@pytest.mark.parametrize("resume", ["auto", "PATH"])
def test_what_changes_the_meaning_is_refused_before_anything_happens_until_it_is_allowed(
    begun: tuple[Tree, Path], tmp_path: Path, path: str, value: Any, told: str, resume: str
) -> None:
    tree, at_4 = begun
    config = _written(tree, tmp_path, _set(path, value))
    before = sorted(tmp_path.rglob("*"))
    resume, experiment_id = ("auto", "begun") if resume == "auto" else (str(at_4), "on")
    with pytest.raises(UserError) as refusal:
        _run(config, experiment_id, resume)
    message = str(refusal.value)
    assert message.startswith("the config means another run than the checkpoint eid_begun-seen_steps_")
    assert f"  {told}" in "\n".join(_squeezed(line) for line in message.splitlines())
    named = told.partition(" ")[0]
    assert f"--allow-changed {named}" in message
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(UserError, match="means another run"):
        _run(config, experiment_id, resume, allow_changed=("settings.seed",))
    assert _run(config, "on", str(at_4), allow_changed=(named,)) == 8


def _squeezed(line: str) -> str:
    return "  " + "  ".join(part for part in line.split("  ") if part).replace("   ", "  ").strip()


def test_a_batch_of_another_size_keeps_samples_and_tokens_true(
    begun: tuple[Tree, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    _, at_4 = begun
    # as a user would write it: 512 tokens in all, as before
    tree = tiny_config(tmp_path, num_steps=4, global_batch=8)
    tree["lr_scheduler"]["config"]["total_steps"] = 8
    assert _run(_written(tree, tmp_path), "on", str(at_4)) == 6
    assert "global_num_samples_per_step  4 -> 8" in caplog.text
    assert "2 more steps, instead of to step 4, make the 512 tokens of the target" in caplog.text
    assert [(step, metrics["consumed tokens"]) for step, _, metrics in _results(tmp_path / "on") if metrics] == [
        (5, 384),
        (6, 512),
    ]
    last = _manifest(tmp_path / "on", 6)
    assert (last.progress.num_seen_samples, last.progress.num_seen_tokens, last.progress.num_target_steps) == (
        32,
        512,
        6,
    )
    # preempted and resumed once more, it still ends there
    assert _run(tmp_path / "config.yaml", "on", "auto") == 6


def _manifest(run_folder: Path, step: int) -> Manifest:
    manifest = read_manifest(_checkpoint(run_folder, step).manifest_path)
    assert manifest is not None
    return manifest


@pytest.mark.parametrize(
    "scheduler", ["dummy_lr", "linear_warmup_cosine_annealing_lr", "cosine_annealing_lr", "onecycle_lr"]
)
@pytest.mark.parametrize("wrapper", ["fsdp2", "fsdp1"])
def test_a_new_learning_rate_holds_from_there_on_as_if_it_had_always_been(
    tmp_path: Path, wrapper: str, scheduler: str
) -> None:
    fields: Tree = {
        "dummy_lr": {},
        "linear_warmup_cosine_annealing_lr": {
            "warmup_steps": 2,
            "total_steps": 8,
            "initial_lr": 1e-3,
            "final_lr": 1e-4,
        },
        "cosine_annealing_lr": {"t_max": 8, "eta_min": 1e-4},
        "onecycle_lr": {
            "total_steps": 8,
            "pct_start": 0.5,
            "anneal_strategy": "cos",
            "div_factor": 10,
            "final_div_factor": 100,
        },
    }
    has_peak = scheduler in ("linear_warmup_cosine_annealing_lr", "onecycle_lr")

    def tree_of(rate: float) -> Tree:
        tree = tiny_config(tmp_path, wrapper=wrapper)
        tree["optimizer"]["config"]["lr"] = rate
        config = {**fields[scheduler], "optimizer": tree["lr_scheduler"]["config"]["optimizer"]}
        if has_peak:
            config["max_lr"] = rate
        tree["lr_scheduler"] = component("scheduler", scheduler, **config)
        return tree

    run_on_ranks(_run, 2, _written(tree_of(1e-2), tmp_path), "old")
    run_on_ranks(_run, 2, _written(tree_of(2e-2), tmp_path), "always")
    at_4 = _checkpoint(tmp_path / "old", 4).path
    on = RunRequest(tmp_path / "config.yaml", tmp_path, "on", str(at_4), allow_changed=("all",))
    run_on_ranks(run, 2, on)
    old, always, changed = (_rates(tmp_path / name) for name in ("old", "always", "on"))
    assert changed == {step: always[step] for step in (5, 6, 7, 8)}
    assert changed != {step: old[step] for step in (5, 6, 7, 8)}
    source = open_source(locate_checkpoint(tmp_path / "on").path)
    reference = open_source(locate_checkpoint(tmp_path / "always").path)
    groups = [key for key in source.forms if key.startswith("app.optimizer.param_groups.") or "scheduler" in key]
    assert {key: source.read(key) for key in groups} == {key: reference.read(key) for key in groups}


def test_an_allowed_change_of_a_hyperparameter_reaches_every_group(begun: tuple[Tree, Path], tmp_path: Path) -> None:
    tree, at_4 = begun
    config = _written(tree, tmp_path, _set("optimizer.config.weight_decay", 0.3))
    _run(config, "on", str(at_4), allow_changed=("weight_decay",))
    source = open_source(locate_checkpoint(tmp_path / "on").path)
    decays = {source.read(key) for key in source.forms if key.endswith(".weight_decay")}
    assert decays == {0.3, 0.0}


def test_what_was_allowed_once_is_the_run_s_own_from_its_next_checkpoint_on(
    begun: tuple[Tree, Path], tmp_path: Path
) -> None:
    tree, at_4 = begun
    config = _written(tree, tmp_path, _set("optimizer.config.eps", 1e-6))
    _run(config, "on", str(at_4), allow_changed=("optimizer",))
    assert _run(config, "on", "auto") == 8
    with pytest.raises(UserError, match=r"optimizer.eps  1.0e-06 -> 1.0e-08"):
        _run(_written(tree, tmp_path), "on", "auto")


def test_a_word_that_names_nothing_is_told(begun: tuple[Tree, Path], tmp_path: Path) -> None:
    tree, at_4 = begun
    config = _written(tree, tmp_path, _set("optimizer.config.eps", 1e-6))
    with pytest.raises(UserError, match=r"optimizer.ep names nothing in the config; did you mean `optimizer.eps`"):
        _run(config, "on", str(at_4), allow_changed=("optimizer.ep", "optimizer.*"))


def test_shapes_cannot_change_whatever_is_allowed(begun: tuple[Tree, Path], tmp_path: Path) -> None:
    tree, at_4 = begun
    config = _written(tree, tmp_path, _set("model_raw.config.ffn_hidden", 64))
    with pytest.raises(CheckpointError, match=r"(?s)shape .*in the checkpoint, .*nothing was loaded") as refusal:
        _run(config, "on", str(at_4), allow_changed=("all",))
    assert "--allow-changed" not in str(refusal.value)


def test_the_data_itself_counts_not_where_it_lies(begun: tuple[Tree, Path], tmp_path: Path) -> None:
    tree, at_4 = begun
    moved = tmp_path / "elsewhere.pbin"
    moved.write_bytes((tmp_path / "train.pbin").read_bytes())
    config = _written(tree, tmp_path, _set("train_dataset.config.raw_data_path", str(moved)))
    assert _run(config, "on", str(at_4)) == 8
    content = bytearray(moved.read_bytes())
    content[1000] ^= 1
    moved.write_bytes(bytes(content))
    with pytest.raises(UserError, match=r"train_dataset.content .*xxh3_128.* -> .*xxh3_128"):
        _run(config, "two", str(at_4))
    write_tokens(moved, 3000, 128)
    with pytest.raises(UserError, match="num_bytes: 3034") as refusal:
        _run(config, "two", str(at_4))
    assert "train_dataset.raw_data_path" in str(refusal.value)


def test_all_ranks_refuse_alike(begun: tuple[Tree, Path], tmp_path: Path) -> None:
    tree, at_4 = begun
    config = _written(tree, tmp_path, _set("optimizer.config.lr", 1.0))
    for message in run_on_ranks(_refusal, 2, config, str(at_4)):
        assert "optimizer.lr" in message


def _refusal(config: Path, resume: str) -> str:
    with pytest.raises(UserError) as refusal:
        _run(config, "on", resume)
    return str(refusal.value)


def test_a_part_of_a_checkpoint_is_loaded_into_whatever_the_user_built(
    begun: tuple[Tree, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tree, at_4 = begun
    tree["checkpoint_loading"] = component("checkpoint_loading", "dcp", global_rank=0, exclude=["optimizer.*"])
    assert _run(_written(tree, tmp_path, _set("optimizer.config.lr", 1e-3)), "on", str(at_4)) == 8
    assert "changed since the checkpoint of step 4" in caplog.text


def test_a_checkpoint_that_does_not_tell_its_config_is_gone_on_with(begun: tuple[Tree, Path], tmp_path: Path) -> None:
    tree, at_4 = begun
    (at_4 / "manifest.json").unlink()
    assert _run(_written(tree, tmp_path, _set("optimizer.config.eps", 1e-6)), "on", str(at_4)) == 8


def test_a_field_that_an_older_version_did_not_have_is_no_change(begun: tuple[Tree, Path], tmp_path: Path) -> None:
    tree, at_4 = begun
    manifest = read_manifest(at_4 / "manifest.json")
    assert manifest is not None
    older = {key: value for key, value in manifest.config.items() if key != "sampler.shuffle_method"}
    assert len(older) == len(manifest.config) - 1
    (at_4 / "manifest.json").write_bytes(replace(manifest, config=older).to_bytes())
    assert _run(_written(tree, tmp_path), "on", str(at_4)) == 8
    sampler = "train_dataloader.config.batch_sampler.config.sampler.config"
    with pytest.raises(UserError, match=r"shuffle_method  absent -> FEISTEL"):
        _run(_written(tree, tmp_path, _set(f"{sampler}.shuffle_method", "feistel")), "two", str(at_4))


def test_the_config_is_readable_in_the_manifest(begun: tuple[Tree, Path]) -> None:
    _, at_4 = begun
    config = yaml.safe_load((at_4 / "manifest.json").read_text())["config"]
    assert config["optimizer"] == "optimizer/adam_w"
    assert config["optimizer.lr"] == 0.01
    assert config["model/gpt2.n_layer"] == 2
    assert config["sampler.seed"] == 3
    assert set(config["dataset.content"]) == {"num_bytes", "xxh3_128"}


@pytest.mark.parametrize(("first", "second"), [("fsdp1", "fsdp2"), ("fsdp2", "fsdp1")])
def test_another_wrapper_is_told_and_the_samples_and_rates_stay_the_same(
    tmp_path: Path, first: str, second: str
) -> None:
    saving = tiny_config(tmp_path, wrapper="fsdp2")["checkpoint_saving"]
    trees = {name: {**tiny_config(tmp_path, wrapper=name), "checkpoint_saving": saving} for name in (first, second)}
    run_on_ranks(_run, 2, _written(trees[first], tmp_path), "one")
    at_4 = _checkpoint(tmp_path / "one", 4).path
    told = run_on_ranks(_run_and_listen, 2, _written(trees[second], tmp_path), "other", str(at_4))
    assert f"{second}_wrapped" in told[0]
    assert "seed" not in told[0]
    one, other = (
        {step: losses["train loss last"] for step, losses, metrics in _results(tmp_path / name) if metrics}
        for name in ("one", "other")
    )
    assert other == pytest.approx({step: one[step] for step in (5, 6, 7, 8)}, abs=1e-5)
    assert _rates(tmp_path / "other") == {step: rate for step, rate in _rates(tmp_path / "one").items() if step > 4}


def _run_and_listen(config: Path, experiment_id: str, resume: str) -> str:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("modalities.training.resuming")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    _run(config, experiment_id, resume)
    return "\n".join(told)
