"""Losses and gradients of unevenly masked batches do not depend on how the step is split."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from modalities.run import RunRequest, run
from modalities.testing.ranks import run_on_ranks
from modalities.testing.tiny import tiny_config, write_config


def _run(config: Path, root: Path, experiment_id: str) -> None:
    # what `--import` does
    spec = importlib.util.spec_from_file_location("masking_collator", Path(__file__).parent / "masking_collator.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["masking_collator"] = module
    spec.loader.exec_module(module)
    run(RunRequest(config, root, experiment_id))


def _figures(root: Path, experiment_id: str) -> list[tuple[float, float]]:
    results = [json.loads(line) for line in (root / experiment_id / "metrics.jsonl").read_text().splitlines()]
    train = [r for r in results if r["dataloader_tag"] == "train"]
    return [(r["losses"]["train loss last"], r["metrics"]["grad norm last"]) for r in train]


def _evaluation(root: Path, experiment_id: str) -> list[float]:
    results = [json.loads(line) for line in (root / experiment_id / "metrics.jsonl").read_text().splitlines()]
    return [r["losses"]["CLMCrossEntropyLoss"] for r in results if r["dataloader_tag"] == "heldout"]


def test_any_split_of_a_step_trains_alike(tmp_path: Path) -> None:
    figures, evaluations = {}, {}
    for world_size, accumulation in ((1, 1), (1, 4), (2, 1), (2, 2)):
        tree = tiny_config(tmp_path, num_steps=4, gradient_accumulation_steps=accumulation)
        for loader in (tree["train_dataloader"], tree["eval_dataloaders"][0]):
            loader["config"]["collate_fn"]["variant_key"] = "masks_by_first_token"
        name = f"ranks-{world_size}-micro-batches-{accumulation}"
        config = write_config(tree, tmp_path / f"{name}.yaml")
        run_on_ranks(_run, world_size, config, tmp_path, name)
        figures[name] = _figures(tmp_path, name)
        evaluations[name] = _evaluation(tmp_path, name)
    assert len(set(map(len, evaluations.values()))) == 1
    for evaluation in evaluations.values():
        assert evaluation == pytest.approx(evaluations["ranks-1-micro-batches-1"], abs=2e-6)
    reference = figures.pop("ranks-1-micro-batches-1")
    assert len(reference) == 4
    for name, other in figures.items():
        for (loss, norm), (expected_loss, expected_norm) in zip(other, reference, strict=True):
            assert loss == pytest.approx(expected_loss, abs=2e-6), name
            assert norm == pytest.approx(expected_norm, rel=1e-4), name
