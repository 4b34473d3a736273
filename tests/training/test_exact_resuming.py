"""A run resumed from its own checkpoint is the unbroken run, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modalities.checkpointing.discovery import checkpoints_in
from modalities.run import RunRequest, run
from modalities.testing.ranks import run_on_ranks
from modalities.testing.tiny import component, read_tensors, reference, tiny_config, write_config

Tree = dict[str, Any]

SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.3},
    "tied weights": {"use_weight_tying": True},
    "vocabulary not divisible by the world": {"vocab_size": 131},
    "gradient accumulation": {"gradient_accumulation_steps": 2},
    "across an epoch": {"num_tokens": 16 * 22 + 1},
    "data workers": {"num_workers": 2},
    "all at once": {
        "dropout": 0.3,
        "use_weight_tying": True,
        "vocab_size": 131,
        "gradient_accumulation_steps": 2,
        "num_tokens": 16 * 22 + 1,
        "num_workers": 2,
    },
}


def _feistel(tree: Tree) -> None:
    _sampler(tree)["config"]["shuffle_method"] = "feistel"


def _in_file_order(tree: Tree) -> None:
    _sampler(tree)["config"]["shuffle"] = False


def _dealt_by_the_mesh(tree: Tree) -> None:
    sampler = _sampler(tree)
    sampler["variant_key"] = "resumable_distributed_multi_dim_sampler"
    del sampler["config"]["rank"], sampler["config"]["num_replicas"]
    sampler["config"] |= {"device_mesh": reference("device_mesh"), "data_parallel_key": "dp_shard"}


def _without_reused_targets(tree: Tree) -> None:
    tree["train_dataset"]["config"]["reuse_last_target"] = False


def _saved_while_training_waits(tree: Tree) -> None:
    tree["checkpoint_saving"]["config"]["checkpoint_saving_execution"]["config"]["mode"] = "sync"


def _saved_beside_training(tree: Tree) -> None:
    tree["checkpoint_saving"]["config"]["checkpoint_saving_execution"]["config"]["mode"] = "async"


def _sharded_in_copies(tree: Tree) -> None:
    tree["device_mesh"]["config"]["data_parallel_replicate_degree"] = 2


def _sampler(tree: Tree) -> Tree:
    sampler: Tree = tree["train_dataloader"]["config"]["batch_sampler"]["config"]["sampler"]
    return sampler


def _run(config: Path, root: Path, experiment_id: str, resume: str = "none") -> None:
    run(RunRequest(config, root, experiment_id, resume))


def _losses(root: Path, experiment_id: str, after_step: int) -> list[dict[str, Any]]:
    lines = (root / experiment_id / "metrics.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    return [
        {**r, "throughput_metrics": r["throughput_metrics"].get("lr mean")}
        for r in results
        if r["num_train_steps_done"] > after_step
    ]


def _final_tensors(root: Path, experiment_id: str) -> dict[str, Any]:
    checkpoint = checkpoints_in(root / experiment_id / "checkpoints")[-1]
    assert checkpoint.progress.num_seen_steps == 8
    if checkpoint.is_distributed:
        return read_tensors(checkpoint.path)
    model = torch.load(checkpoint.path, weights_only=True)
    optimizer = torch.load(checkpoint.optimizer_path, weights_only=True)
    states = {f"{name}.{key}": v for name, state in optimizer["state"].items() for key, v in state.items()}
    return {**model, **states}


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_resumed_run_equals_the_unbroken_one(tmp_path: Path, wrapper: str, scenario: str) -> None:
    config = write_config(tiny_config(tmp_path, wrapper=wrapper, **SCENARIOS[scenario]), tmp_path / "config.yaml")
    _check(config, tmp_path, 2)


@pytest.mark.parametrize(
    "change",
    [
        _feistel,
        _in_file_order,
        _dealt_by_the_mesh,
        _without_reused_targets,
        _saved_while_training_waits,
        _saved_beside_training,
    ],
)
def test_every_sampler_dataset_and_way_of_saving_resumes_exactly(
    tmp_path: Path, change: Callable[[Tree], None]
) -> None:
    tree = tiny_config(tmp_path, **SCENARIOS["all at once"])
    change(tree)
    _check(write_config(tree, tmp_path / "config.yaml"), tmp_path, 2)


def test_hybrid_sharding_resumes_exactly(tmp_path: Path) -> None:
    tree = tiny_config(tmp_path, global_batch=8, **SCENARIOS["all at once"])
    _sharded_in_copies(tree)
    _check(write_config(tree, tmp_path / "config.yaml"), tmp_path, 4)


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_a_resumed_run_that_is_resumed_in_a_later_epoch_is_the_unbroken_one(tmp_path: Path, wrapper: str) -> None:
    options = {**SCENARIOS["all at once"], "num_tokens": 16 * 9 + 1}
    tree = tiny_config(tmp_path, wrapper=wrapper, checkpointing_interval=2, **options)
    config = write_config(tree, tmp_path / "config.yaml")
    run_on_ranks(_run, 2, config, tmp_path, "unbroken")
    # 9 samples, 4 a step: in the first epoch, and in the third
    at_2 = checkpoints_in(tmp_path / "unbroken" / "checkpoints")[0]
    run_on_ranks(_run, 2, config, tmp_path, "once", str(at_2.path))
    at_6 = checkpoints_in(tmp_path / "once" / "checkpoints")[1]
    assert at_6.progress.num_seen_steps == 6
    run_on_ranks(_run, 2, config, tmp_path, "twice", str(at_6.path))
    _compare(tmp_path, "twice", 6)


def _check(config: Path, root: Path, world_size: int) -> None:
    run_on_ranks(_run, world_size, config, root, "unbroken")
    halfway = checkpoints_in(root / "unbroken" / "checkpoints")[0]
    assert halfway.progress.num_seen_steps == 4
    run_on_ranks(_run, world_size, config, root, "resumed", str(halfway.path))
    _compare(root, "resumed", 4)


def _compare(root: Path, name: str, after_step: int) -> None:
    unbroken, resumed = _losses(root, "unbroken", after_step), _losses(root, name, 0)
    assert len(unbroken) >= 8 - after_step + 1
    assert resumed == unbroken
    expected, got = _final_tensors(root, "unbroken"), _final_tensors(root, name)
    assert expected.keys() == got.keys()
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


@pytest.mark.parametrize("scheduler", ["linear_warmup_cosine_annealing_lr", "cosine_annealing_lr"])
def test_full_files_without_more_beside_them_go_on_by_the_steps_of_their_name(tmp_path: Path, scheduler: str) -> None:
    tree = tiny_config(tmp_path, wrapper="fsdp1")
    if scheduler == "cosine_annealing_lr":
        optimizer = tree["lr_scheduler"]["config"]["optimizer"]
        tree["lr_scheduler"] = component("scheduler", scheduler, optimizer=optimizer, t_max=8, eta_min=1e-5)
    config = write_config(tree, tmp_path / "config.yaml")
    run_on_ranks(_run, 2, config, tmp_path, "unbroken")
    halfway = checkpoints_in(tmp_path / "unbroken" / "checkpoints")[0]
    # as older versions have left them
    halfway.resume_state_path.unlink()
    halfway.manifest_path.unlink()
    run_on_ranks(_run, 2, config, tmp_path, "resumed", str(halfway.path))
    _compare(tmp_path, "resumed", 4)
