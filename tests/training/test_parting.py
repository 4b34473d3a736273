"""Deterministic runs, digests of their weights, and the first step and tensor at which two runs part."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.discovery import checkpoints_in
from modalities.exceptions import RunsPart, UserError
from modalities.factory.build import build
from modalities.run import RunRequest, compose, plan_of, run
from modalities.testing.ranks import run_on_ranks
from modalities.testing.tiny import tiny_config, write_config
from modalities.training.determinism import deterministic, sum_of_bits, tensor_digest, weight_digests
from modalities.training.recipe import TrainingRecipe


def _run_on_two(config: Path, experiment_id: str, resume: str = "none", **words: Any) -> None:
    run_on_ranks(run, 2, RunRequest(config, config.parent, experiment_id, resume, **words))


def _run(config: Path, experiment_id: str, resume: str = "none", **words: Any) -> int:
    return run(RunRequest(config, config.parent, experiment_id, resume, **words)).progress.num_seen_steps


def _digests(config: Path) -> dict[str, str]:
    recipe = build(plan_of(compose(RunRequest(config, config.parent, "x"))), TrainingRecipe)
    app_state: AppState = recipe.app_state
    digests = weight_digests(app_state)
    full = {
        name: tensor_digest(value.full_tensor())
        for name, value in app_state.model_state_dict().items()
        if hasattr(value, "full_tensor")
    }
    assert {name: digests[name] for name in full} == full
    return digests


@pytest.mark.parametrize("tied", [False, True])
def test_digests_do_not_depend_on_the_sharding(tmp_path: Path, tied: bool) -> None:
    options: dict[str, Any] = {"vocab_size": 131, "use_weight_tying": tied, "global_batch": 12}
    one = tiny_config(tmp_path, **options)
    (single,) = run_on_ranks(_digests, 1, write_config(one, tmp_path / "one.yaml"))
    fsdp1 = write_config(tiny_config(tmp_path, wrapper="fsdp1", **options), tmp_path / "fsdp1.yaml")
    hybrid = tiny_config(tmp_path, **options)
    hybrid["device_mesh"]["config"] |= {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
    hsdp = write_config(hybrid, tmp_path / "hsdp.yaml")
    for world_size, config in ((2, tmp_path / "one.yaml"), (3, tmp_path / "one.yaml"), (2, fsdp1), (4, hsdp)):
        for digests in run_on_ranks(_digests, world_size, config):
            assert digests == single


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
)
def test_one_flipped_bit_is_another_digest(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(4, 6).to(dtype)
    other = tensor.clone()
    raw = other.reshape(-1).view(torch.uint8)
    raw[5] ^= 1
    assert tensor_digest(tensor) != tensor_digest(other)
    assert tensor_digest(tensor) == tensor_digest(tensor.T)
    parts = sum_of_bits(tensor[:1]) + sum_of_bits(tensor[1:])
    assert int(parts) == int(sum_of_bits(tensor))
    assert tensor_digest(tensor[:0]) == "0" * 16


def test_deterministic_algorithms_are_set_for_the_run_only() -> None:
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()


def test_a_deterministic_run_keeps_digests_of_every_logged_step(tmp_path: Path) -> None:
    tree = tiny_config(tmp_path)
    tree["settings"]["deterministic"] = True
    config = write_config(tree, tmp_path / "config.yaml")
    _run_on_two(config, "unbroken")
    halfway = checkpoints_in(tmp_path / "unbroken" / "checkpoints")[0].path
    _run_on_two(config, "unbroken", str(halfway))
    lines = [json.loads(line) for line in (tmp_path / "unbroken" / "digests.jsonl").read_text().splitlines()]
    assert [line["num_train_steps_done"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    superseded = (tmp_path / "unbroken" / "digests.superseded.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in superseded] == lines[4:]
    # and that they are of the weights is proven by the checkpoint
    _run_on_two(config, "resumed", str(halfway), check_against=tmp_path / "unbroken")


def test_a_resumed_run_is_checked_against_the_unbroken_one(tmp_path: Path) -> None:
    config = write_config(tiny_config(tmp_path, dropout=0.2), tmp_path / "config.yaml")
    _run_on_two(config, "unbroken")
    halfway = checkpoints_in(tmp_path / "unbroken" / "checkpoints")[0].path
    command = [sys.executable, "-m", "modalities", "run", "--config", str(config), "--experiments_root_path"]
    command += [str(tmp_path), "--experiment_id", "resumed", "--resume", str(halfway), "--nproc", "2"]
    done = subprocess.run(
        [*command, "--check-against", str(tmp_path / "unbroken")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"equal to {tmp_path / 'unbroken'} at all 4 steps that both have logged" in done.stdout


@pytest.mark.parametrize("keeps_digests", [True, False])
def test_the_first_step_and_tensor_at_which_two_runs_part_are_named(tmp_path: Path, keeps_digests: bool) -> None:
    tree = tiny_config(tmp_path, checkpointing_interval=2)
    tree["settings"]["deterministic"] = keeps_digests
    config = write_config(tree, tmp_path / "config.yaml")
    _run_on_two(config, "one")
    at_2 = checkpoints_in(tmp_path / "one" / "checkpoints")[0].path
    command = [sys.executable, "-m", "modalities", "run", "--config", str(config), "--experiments_root_path"]
    command += [str(tmp_path), "--experiment_id", "other", "--resume", str(at_2), "--nproc", "2", "--check-against"]
    command += [str(tmp_path / "one"), "optimizer.betas=[0.8,0.95]", "--allow-changed", "optimizer.betas"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    message = done.stderr[done.stderr.index("error: ") :].splitlines()
    # another beta changes the weights of step 3, and with them the loss of step 4
    step = 3 if keeps_digests else 4
    assert message[0] == f"error: this run parts from {tmp_path / 'one'} at step {step}:"
    (named,) = [line for line in message if "first tensor" in line]
    assert re.fullmatch(r"  first tensor that differs: transformer.wte.weight \((2\d) of 23 do\)", named)
    saved = checkpoints_in(tmp_path / "other" / "checkpoints")[-1]
    assert saved.progress.num_seen_steps == step
    assert str(saved.path) in message[-1]


def test_where_weights_are_equal_or_unknown_that_is_told(tmp_path: Path) -> None:
    tree = tiny_config(tmp_path, checkpointing_interval=8)
    config = write_config(tree, tmp_path / "config.yaml")
    _run(config, "one")
    metrics = tmp_path / "one" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[2]["losses"]["train loss last"] += 1
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RunsPart, match=r"at step 3:\n  train loss last: .*\n  which tensor is not known"):
        _run(config, "other", check_against=tmp_path / "one")
    lines[2]["losses"]["train loss last"] -= 1
    del lines[3:-2]
    lines[-2]["metrics"]["grad norm last"] += 1
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RunsPart, match=r"at step 8:\n  grad norm last: .*\n  all weights are equal"):
        _run(config, "another", check_against=tmp_path / "one")


def test_runs_that_share_no_step_are_not_called_equal(tmp_path: Path) -> None:
    config = write_config(tiny_config(tmp_path), tmp_path / "config.yaml")
    _run(config, "one")
    metrics = tmp_path / "one" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    halfway = checkpoints_in(tmp_path / "one" / "checkpoints")[0].path
    shutil.rmtree(checkpoints_in(tmp_path / "one" / "checkpoints")[1].path)
    with pytest.raises(RunsPart, match="nothing was compared"):
        _run(config, "other", str(halfway), check_against=tmp_path / "one")


def test_there_must_be_another_run_to_compare_with(tmp_path: Path) -> None:
    config = write_config(tiny_config(tmp_path), tmp_path / "config.yaml")
    with pytest.raises(UserError, match="there is no run that has logged"):
        _run(config, "x", check_against=tmp_path / "absent")
    assert not (tmp_path / "x").exists()
    with pytest.raises(UserError, match="is this run's own folder"):
        _run(config, "x", check_against=tmp_path / "x")
