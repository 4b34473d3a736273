"""Precision is the config's choice, and changes figures only as far as it must."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from modalities.parallel.precision import is_fast_in_bfloat16
from modalities.run import RunRequest, run
from modalities.testing.ranks import run_on_ranks
from modalities.testing.tiny import tiny_config, write_config
from modalities.training.assembly import autocast_dtype
from modalities.training.settings import Autocast


def _run(config: Path, root: Path, experiment_id: str) -> None:
    run(RunRequest(config, root, experiment_id))


def _losses(tmp_path: Path, tree: dict[str, Any], name: str, world_size: int = 2) -> list[float]:
    run_on_ranks(_run, world_size, write_config(tree, tmp_path / f"{name}.yaml"), tmp_path, name)
    results = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    return [r["losses"]["train loss last"] for r in results if r["dataloader_tag"] == "train"]


def test_bfloat16_trains_close_to_float32(tmp_path: Path) -> None:
    expected = _losses(tmp_path, tiny_config(tmp_path), "float32")
    fsdp2 = tiny_config(tmp_path)
    fsdp2["sharded_model"]["config"]["mixed_precision_settings"] = {"param_dtype": "BF_16", "reduce_dtype": "FP_32"}
    fsdp1 = tiny_config(tmp_path, wrapper="fsdp1")
    fsdp1["model"]["config"]["mixed_precision_settings"] = "MIXED_PRECISION_MEGATRON"
    autocast = tiny_config(tmp_path)
    autocast["settings"]["autocast"] = "bf16"
    for name, tree, world_size in (("fsdp2", fsdp2, 2), ("fsdp1", fsdp1, 2), ("autocast", autocast, 1)):
        losses = _losses(tmp_path, tree, name, world_size)
        assert losses != expected
        assert losses == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(("is_fast", "expected"), [(True, torch.bfloat16), (False, None)])
def test_auto_follows_the_probe(monkeypatch: pytest.MonkeyPatch, is_fast: bool, expected: torch.dtype | None) -> None:
    cpu = torch.device("cpu")
    assert is_fast_in_bfloat16(cpu) in (True, False)
    # its outcome is the machine's; what follows from it is ours
    monkeypatch.setattr("modalities.training.assembly.is_fast_in_bfloat16", lambda device: is_fast)
    assert autocast_dtype(Autocast.AUTO, cpu) is expected
    assert autocast_dtype(Autocast.NONE, cpu) is None
    assert autocast_dtype(Autocast.BF_16, cpu) is torch.bfloat16
