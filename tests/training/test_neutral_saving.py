"""Saving changes nothing of the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.checkpoint_saving import make_dcp_execution
from modalities.checkpointing.comparison import compare
from modalities.checkpointing.discovery import locate_checkpoint
from modalities.checkpointing.fsdp.fsdp_checkpoint_saving import FSDP1CheckpointSaving
from modalities.checkpointing.interfaces import CheckpointSavingExecutionABC
from modalities.checkpointing.reading.sources import open_source
from modalities.parallel.fsdp1 import shard_model
from modalities.parallel.settings import MixedPrecisionSettings, ShardingStrategy
from modalities.progress import TrainingProgress
from modalities.run import RunRequest, run
from modalities.testing.ranks import run_on_ranks
from modalities.testing.tiny import tiny_config, write_config

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {"weight_decay": 0.1},
    "AdamW": {"amsgrad": True},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adagrad": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
}


def _weights_after_training(folder: Path, way: str, optimizer_name: str, *, saves: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Dropout(0.3), torch.nn.Linear(5, 3))
    if way == "fsdp1":
        precision, strategy = MixedPrecisionSettings.NO_MIXED_PRECISION, ShardingStrategy.FULL_SHARD
        model = shard_model(model, True, precision, strategy, ["Linear"])
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=0.1, **OPTIMIZERS[optimizer_name])
    app_state = AppState(model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    assert app_state.lr_scheduler is not None
    rank = torch.distributed.get_rank()
    execution: CheckpointSavingExecutionABC
    if way == "fsdp1":
        execution = FSDP1CheckpointSaving(folder, "x", rank)
    else:
        execution = make_dcp_execution(folder, "x", rank, "async" if way == "async" else "sync", 60)
    torch.manual_seed(1 + rank)
    for step in range(5):
        if saves and step < 3:
            execution.save_checkpoint(app_state, TrainingProgress(step, step, 9, 9))
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        app_state.lr_scheduler.step()
        optimizer.zero_grad()
    execution.settle()
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return [parameter.detach().clone() for parameter in local]


def _with_and_without(folder: Path, way: str) -> None:
    for name in OPTIMIZERS:
        saved = _weights_after_training(folder / name, way, name, saves=True)
        unsaved = _weights_after_training(folder / name, way, name, saves=False)
        assert all(map(torch.equal, saved, unsaved)), name


@pytest.mark.parametrize("way", ["fsdp1", "sync", "async"])
def test_saving_at_steps_0_1_and_2_changes_no_bit_of_the_weights(tmp_path: Path, way: str) -> None:
    run_on_ranks(_with_and_without, 2, tmp_path, way)


def _losses(run_folder: Path) -> list[Any]:
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [(line["num_train_steps_done"], line["losses"], line["metrics"]) for line in lines]


def _run(config: Path, experiment_id: str) -> None:
    run(RunRequest(config, config.parent, experiment_id))


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_a_run_that_saves_every_step_is_the_run_that_saves_once(tmp_path: Path, wrapper: str) -> None:
    for name, interval in (("once", 8), ("always", 1)):
        tree = tiny_config(tmp_path, wrapper=wrapper, checkpointing_interval=interval, dropout=0.3, num_workers=1)
        tree["settings"]["intervals"]["evaluation_interval_in_steps"] = 4
        run_on_ranks(_run, 2, write_config(tree, tmp_path / "config.yaml"), name)
    once, always = (locate_checkpoint(tmp_path / name) for name in ("once", "always"))
    assert [told for told in compare(open_source(once.path), open_source(always.path)) if told.status != "equal"] == []
    assert _losses(tmp_path / "always") == _losses(tmp_path / "once")
