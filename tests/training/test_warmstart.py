"""Configs that load a checkpoint by themselves go on as the unbroken run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modalities.checkpointing.discovery import checkpoints_in
from modalities.run import RunRequest, run
from modalities.testing.ranks import run_on_ranks
from modalities.testing.tiny import component, reference, tiny_config, write_config


def _run(config: Path, root: Path, experiment_id: str, info: Path | None) -> None:
    run(RunRequest(config, root, experiment_id, last_checkpoint_info=info))


def _results(root: Path, experiment_id: str) -> list[dict[str, Any]]:
    results = [json.loads(line) for line in (root / experiment_id / "metrics.jsonl").read_text().splitlines()]
    return [{key: r[key] for key in ("dataloader_tag", "num_train_steps_done", "losses", "metrics")} for r in results]


def test_fsdp1_files_bring_back_model_optimizer_and_schedule(tmp_path: Path) -> None:
    tree = tiny_config(tmp_path, wrapper="fsdp1", dropout=0.2)
    config = write_config(tree, tmp_path / "config.yaml")
    run_on_ranks(_run, 2, config, tmp_path, "unbroken", None)
    halfway = checkpoints_in(tmp_path / "unbroken" / "checkpoints")[0]
    info = tmp_path / "info.json"
    paths = {"model_checkpoint_path": str(halfway.path), "optimizer_checkpoint_path": str(halfway.optimizer_path)}
    info.write_text(json.dumps(paths))

    model_path = "${settings.warmstart_checkpoint_paths.model_checkpoint_path}"

    def number(variant: str) -> dict[str, Any]:
        return component("number_conversion", f"{variant}_from_checkpoint_path", checkpoint_path=model_path)

    tree["settings"]["warmstart_checkpoint_paths"] = "${warmstart_env:checkpoint_paths}"
    tree["settings"]["training_progress"] = {
        "global_num_seen_tokens": number("global_num_seen_tokens"),
        "num_seen_steps": number("num_seen_steps"),
        "num_seen_samples": 16,
        "last_step": number("last_step"),
    }
    tree["loading"] = component(
        "checkpoint_loading",
        "fsdp1",
        global_rank="${cuda_env:RANK}",
        block_names=["GPT2Block"],
        mixed_precision_settings="NO_MIXED_PRECISION",
        sharding_strategy="FULL_SHARD",
    )
    del tree["initialized_model"]
    tree["model"] = component(
        "model",
        "fsdp1_checkpointed",
        checkpoint_loading=reference("loading"),
        checkpoint_path=model_path,
        model=reference("model_raw"),
    )
    tree["fresh_optimizer"] = tree["optimizer"]
    tree["optimizer"] = component(
        "optimizer",
        "fsdp1_checkpointed",
        checkpoint_loading=reference("loading"),
        checkpoint_path="${settings.warmstart_checkpoint_paths.optimizer_checkpoint_path}",
        wrapped_model=reference("model"),
        optimizer=reference("fresh_optimizer"),
    )
    tree["lr_scheduler"]["config"]["last_epoch"] = "${settings.training_progress.last_step}"
    warm = write_config(tree, tmp_path / "warmstart.yaml")
    run_on_ranks(_run, 2, warm, tmp_path, "warm", info)

    later = [r for r in _results(tmp_path, "unbroken") if r["num_train_steps_done"] > 4]
    assert len(later) == 5
    assert _results(tmp_path, "warm") == later
