"""Runs that begin with something of another: all of a checkpoint (a fork), or its weights only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from modalities.checkpointing.discovery import Checkpoint, checkpoints_in
from modalities.exceptions import CheckpointError, DamagedCheckpoint, UserError
from modalities.run import RunRequest, run
from modalities.testing.ranks import run_on_ranks
from modalities.testing.tiny import component, read_tensors, tiny_config, write_config


def _run_on_two(config: Path, experiment_id: str, resume: str = "none", **words: Any) -> None:
    run_on_ranks(run, 2, RunRequest(config, config.parent, experiment_id, resume, **words))


def _run(config: Path, experiment_id: str, resume: str = "none", **words: Any) -> int:
    return run(RunRequest(config, config.parent, experiment_id, resume, **words)).progress.num_seen_steps


def _checkpoint(run_folder: Path, step: int) -> Checkpoint:
    return next(c for c in checkpoints_in(run_folder / "checkpoints") if c.progress.num_seen_steps == step)


def _results(run_folder: Path) -> list[Any]:
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [(line["num_train_steps_done"], line["losses"], line["metrics"]) for line in lines]


def _started(run_folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((run_folder / "run.json").read_text()))


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_a_fork_goes_on_like_its_parent_in_a_folder_that_records_it(tmp_path: Path, wrapper: str) -> None:
    config = write_config(
        tiny_config(tmp_path, wrapper=wrapper, checkpointing_interval=2, dropout=0.2), tmp_path / "config.yaml"
    )
    _run_on_two(config, "parent")
    _run_on_two(config, "fork", fork=str(tmp_path / "parent"), at_step=4)
    expected = [result for result in _results(tmp_path / "parent") if result[0] > 4]
    assert _results(tmp_path / "fork") == expected
    (started,) = _started(tmp_path / "fork")
    assert started["origin"] == {
        "kind": "fork",
        "path": str(_checkpoint(tmp_path / "parent", 4).path),
        "experiment_id": "parent",
        "num_seen_steps": 4,
    }
    # the parent is as it was, and the fork has a history of its own
    assert len(_started(tmp_path / "parent")) == 1
    assert [c.progress.num_seen_steps for c in checkpoints_in(tmp_path / "parent" / "checkpoints")] == [2, 4, 6, 8]
    back = _checkpoint(tmp_path / "fork", 6).path
    _run_on_two(config, "fork", str(back))
    _run_on_two(config, "fork", "auto", fork=str(tmp_path / "parent"), at_step=2)
    assert [start["origin"]["kind"] for start in _started(tmp_path / "fork")] == ["fork", "resume", "resume"]
    assert _results(tmp_path / "fork") == expected


def test_a_step_that_was_not_saved_is_told_with_those_that_were(tmp_path: Path) -> None:
    config = write_config(tiny_config(tmp_path), tmp_path / "config.yaml")
    _run(config, "parent")
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5 in .*; there are those of the steps 4, 8"):
        _run(config, "fork", fork=str(tmp_path / "parent"), at_step=5)
    assert not (tmp_path / "fork").exists()


def test_a_fork_has_a_name_of_its_own(tmp_path: Path) -> None:
    config = write_config(tiny_config(tmp_path), tmp_path / "config.yaml")
    _run(config, "parent")
    with pytest.raises(UserError, match="has checkpoints already"):
        _run(config, "parent", fork=str(tmp_path / "parent"), at_step=4)
    run(RunRequest(config, tmp_path, fork=str(tmp_path / "parent"), at_step=4))
    (name,) = [path.name for path in tmp_path.iterdir() if path.name.endswith("_config")]
    assert _started(tmp_path / name)[0]["origin"]["experiment_id"] == "parent"


@pytest.mark.parametrize(
    ("source", "target"), [("fsdp1", "fsdp1"), ("fsdp1", "fsdp2"), ("fsdp2", "fsdp1"), ("fsdp2", "fsdp2")]
)
@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_another_run_are_taken_and_nothing_else(
    tmp_path: Path, source: str, target: str, tied: bool
) -> None:
    options: dict[str, Any] = {"use_weight_tying": tied, "vocab_size": 131}
    parent = write_config(tiny_config(tmp_path, wrapper=source, **options), tmp_path / "parent.yaml")
    _run_on_two(parent, "parent")
    tree = tiny_config(tmp_path, wrapper=target, seed=9, checkpointing_interval=1, **options)
    # the weights stay what they were taken as
    tree["optimizer"]["config"] |= {"lr": 0.0, "weight_decay": 0.0}
    tree["lr_scheduler"] = component("scheduler", "dummy_lr", optimizer=tree["lr_scheduler"]["config"]["optimizer"])
    config = write_config(tree, tmp_path / "config.yaml")
    _run_on_two(config, "new", init_from=str(tmp_path / "parent"))
    assert _weights(_checkpoint(tmp_path / "new", 1)) == _weights(_checkpoint(tmp_path / "parent", 8))
    assert next(metrics for _, _, metrics in _results(tmp_path / "new") if metrics)["consumed tokens"] == 64
    (started,) = _started(tmp_path / "new")
    assert (started["origin"]["kind"], started["origin"]["num_seen_steps"]) == ("init", 8)
    # from then on it is a run like any other
    _run_on_two(config, "new", "auto", init_from=str(tmp_path / "parent"))
    assert _started(tmp_path / "new")[-1]["origin"]["kind"] == "resume"


def _weights(checkpoint: Checkpoint) -> dict[str, list[float]]:
    if not checkpoint.is_distributed:
        return {name: value.tolist() for name, value in torch.load(checkpoint.path, weights_only=True).items()}
    tensors = read_tensors(checkpoint.path)
    return {
        name.removeprefix("app.model."): value.tolist()
        for name, value in tensors.items()
        if name.startswith("app.model.")
    }


def test_files_of_any_name_give_weights_too(tmp_path: Path) -> None:
    config = write_config(tiny_config(tmp_path), tmp_path / "config.yaml")
    _run(config, "parent")
    folder = _checkpoint(tmp_path / "parent", 8).path
    weights = {
        name.removeprefix("app.model."): value
        for name, value in read_tensors(folder).items()
        if name.startswith("app.model.")
    }
    torch.save(weights, tmp_path / "weights.pt")
    folder.rename(tmp_path / "renamed")
    for number, place in enumerate(("weights.pt", "renamed")):
        assert _run(config, f"new{number}", init_from=str(tmp_path / place)) == 8
    assert _results(tmp_path / "new0") == _results(tmp_path / "new1")
    assert _results(tmp_path / "new0") != _results(tmp_path / "parent")


def test_weights_of_another_model_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    parent = write_config(tiny_config(tmp_path), tmp_path / "parent.yaml")
    _run(parent, "parent")
    config = write_config(tiny_config(tmp_path, n_layer=3), tmp_path / "config.yaml")
    weights = {"transformer.wte.weight": torch.zeros(3)}
    torch.save(weights, tmp_path / "weights.pt")
    for place in (tmp_path / "parent", tmp_path / "weights.pt"):
        with pytest.raises(CheckpointError, match="is of another model"):
            _run(config, "new", init_from=str(place))
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        _run(config, "new", init_from=str(tmp_path / "absent"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("source", ["folder", "file"])
@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_weights_that_are_two_do_not_become_one(tmp_path: Path, wrapper: str, source: str) -> None:
    parent = write_config(tiny_config(tmp_path), tmp_path / "parent.yaml")
    _run(parent, "parent")
    place = _checkpoint(tmp_path / "parent", 8).path
    if source == "file":
        tensors = {
            k.removeprefix("app.model."): v for k, v in read_tensors(place).items() if k.startswith("app.model.")
        }
        place = tmp_path / "weights.pt"
        torch.save(tensors, place)
    tied = write_config(tiny_config(tmp_path, wrapper=wrapper, use_weight_tying=True), tmp_path / "config.yaml")
    for message in run_on_ranks(_refusal, 2, tied, str(place)):
        assert "other weights in transformer.wte.weight than in transformer.lm_head.weight" in message
    assert not (tmp_path / "new").exists()


def _refusal(config: Path, place: str) -> str:
    with pytest.raises(CheckpointError) as refusal:
        _run(config, "new", init_from=place)
    return str(refusal.value)


def _with_base(tree: dict[str, Any], base_freq: int) -> dict[str, Any]:
    tree["model_raw"]["config"]["attention_config"]["qkv_transforms"][0]["config"]["base_freq"] = base_freq
    return tree


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("begin", ["init_from", "fork"])
def test_another_base_of_the_rotary_embedding_takes_effect(tmp_path: Path, wrapper: str, begin: str) -> None:
    config = write_config(tiny_config(tmp_path, wrapper=wrapper), tmp_path / "config.yaml")
    _run_on_two(config, "parent")
    words: dict[str, Any] = {begin: str(tmp_path / "parent")}
    if begin == "fork":
        words |= {"at_step": 4, "allow_changed": ("base_freq",)}
    _run_on_two(write_config(_with_base(tiny_config(tmp_path, wrapper=wrapper), 500), config), "other", **words)
    weights = _weights(_checkpoint(tmp_path / "other", 8))
    stored = [value for name, value in weights.items() if name.endswith("inv_freq")]
    assert len(stored) == 2
    for frequencies in stored:
        assert frequencies == pytest.approx([1.0, 500**-0.5])
    if begin == "init_from":
        words.pop("at_step", None)
        _run_on_two(write_config(tiny_config(tmp_path, wrapper=wrapper), config), "same", **words)
        assert _results(tmp_path / "same") != _results(tmp_path / "other")


def test_a_flipped_bit_in_a_file_without_a_manifest_is_found(tmp_path: Path) -> None:
    config = write_config(tiny_config(tmp_path), tmp_path / "config.yaml")
    _run(config, "parent")
    place = _checkpoint(tmp_path / "parent", 8).path
    file = tmp_path / "weights.pt"
    torch.save({k.removeprefix("app.model."): v for k, v in read_tensors(place).items() if "app.model." in k}, file)
    content = bytearray(file.read_bytes())
    # in a tensor's bytes
    at = content.index(read_tensors(place)["app.model.transformer.wte.weight"].numpy().tobytes()[:32])
    content[at + 100] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(DamagedCheckpoint, match="is not as its checksum says"):
        _run(config, "new", init_from=str(file))
    done = subprocess.run(
        [sys.executable, "-m", "modalities", "checkpoint", "convert", str(file), str(tmp_path / "out.safetensors")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "is not as its checksum says" in done.stderr
    assert not (tmp_path / "out.safetensors").exists()


def test_a_part_of_the_weights_is_taken_where_the_config_says_so(tmp_path: Path) -> None:
    parent = write_config(tiny_config(tmp_path), tmp_path / "parent.yaml")
    _run(parent, "parent")
    tree = tiny_config(tmp_path, n_layer=3)
    tree["checkpoint_loading"] = component("checkpoint_loading", "dcp", global_rank=0, strict=False)
    assert _run(write_config(tree, tmp_path / "config.yaml"), "new", init_from=str(tmp_path / "parent")) == 8


def test_weights_of_another_type_are_cast_where_that_is_allowed(tmp_path: Path) -> None:
    config = write_config(tiny_config(tmp_path), tmp_path / "config.yaml")
    _run(config, "parent")
    folder = _checkpoint(tmp_path / "parent", 8).path
    weights = {k.removeprefix("app.model."): v for k, v in read_tensors(folder).items() if k.startswith("app.model.")}
    torch.save({name: value.bfloat16() for name, value in weights.items()}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="allow_cast: true converts them"):
        _run(config, "new", init_from=str(tmp_path / "weights.pt"))
    tree = tiny_config(tmp_path)
    tree["checkpoint_loading"] = component("checkpoint_loading", "dcp", global_rank=0, allow_cast=True)
    assert _run(write_config(tree, tmp_path / "config.yaml"), "new", init_from=str(tmp_path / "weights.pt")) == 8


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--fork", "a", "--init-from", "b"], "give one"),
        (["--at-step", "4"], "give one of them"),
        (["--fork", "a", "--resume", "b"], "goes on with one; give one of them"),
        (["--init-from", "a", "--resume", "auto"], "name it by --experiment_id"),
        (["--fork", "a", "--allow-changed", "optimizer.lr=1"], "put overrides first"),
    ],
)
def test_words_that_contradict_each_other_are_told(words: list[str], told: str) -> None:
    command = [sys.executable, "-m", "modalities", "run", "--config", "config.yaml", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert told in " ".join(done.stderr.split())
