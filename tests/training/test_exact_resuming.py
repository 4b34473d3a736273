"""A run resumed from its own checkpoint is the unbroken run, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from modalities.checkpointing.discovery import checkpoints_in
from modalities.run import RunRequest, run
from modalities.testing.ranks import run_on_ranks
from modalities.testing.tiny import read_tensors, tiny_config, write_config

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
    run_on_ranks(_run, 2, config, tmp_path, "unbroken")
    halfway = checkpoints_in(tmp_path / "unbroken" / "checkpoints")[0]
    assert halfway.progress.num_seen_steps == 4

    run_on_ranks(_run, 2, config, tmp_path, "resumed", str(halfway.path))

    unbroken, resumed = _losses(tmp_path, "unbroken", 4), _losses(tmp_path, "resumed", 0)
    assert len(unbroken) == 5
    assert resumed == unbroken
    expected, got = _final_tensors(tmp_path, "unbroken"), _final_tensors(tmp_path, "resumed")
    assert expected.keys() == got.keys()
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
