"""Sharded training is plain PyTorch training: same losses, same optimizer state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from modalities.checkpointing.discovery import checkpoints_in
from modalities.composition.compose import ConfigRequest, compose_config
from modalities.config.environment import Environment
from modalities.factory.build import build
from modalities.run import RunRequest, plan_of, run
from modalities.testing.ranks import run_on_ranks
from modalities.testing.tiny import tiny_config, write_config
from modalities.training.recipe import TrainingRecipe

NUM_STEPS = 6


def _plain_loop(config: Path, root: Path) -> tuple[list[float], dict[str, dict[str, Tensor]]]:
    """The same model, batches and optimizer in a loop that knows nothing of modalities' trainer."""
    loaded = compose_config(ConfigRequest(Environment(config, root, "reference")), TrainingRecipe)
    recipe = build(plan_of(loaded), TrainingRecipe)
    model = recipe.app_state.model_parts[0]
    named = dict(model.named_parameters())
    decayed = [p for name, p in named.items() if "attn." in name or "mlp." in name or "lm_head.weight" in name]
    others = [p for p in named.values() if all(p is not q for q in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    batches = recipe.train_dataloader.stream(0)
    losses = []
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step)
        batch = next(batches)
        logits = model({"x": batch.samples["x"]})["logits"]
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets["y"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: optimizer.state[p] for name, p in named.items()}


def _learning_rate(step: int) -> float:
    """Linear from 1e-3 to 1e-2 in 2 steps, then a cosine to 1e-4 at the last."""
    if step < 2:
        return 1e-3 + (1e-2 - 1e-3) * step / 2
    fraction = torch.tensor((step - 2) / (NUM_STEPS - 2), dtype=torch.float64)
    return 1e-4 + (1e-2 - 1e-4) * 0.5 * (1 + torch.cos(torch.pi * fraction).item())


def _run(config: Path, root: Path, experiment_id: str) -> None:
    run(RunRequest(config, root, experiment_id))


def _train_losses(root: Path, experiment_id: str) -> list[float]:
    results = [json.loads(line) for line in (root / experiment_id / "metrics.jsonl").read_text().splitlines()]
    return [r["losses"]["train loss last"] for r in results if r["dataloader_tag"] == "train"]


@pytest.fixture
def reference(tmp_path: Path) -> tuple[list[float], dict[str, dict[str, Tensor]]]:
    config = write_config(tiny_config(tmp_path, num_steps=NUM_STEPS), tmp_path / "reference.yaml")
    ((losses, state),) = run_on_ranks(_plain_loop, 1, config, tmp_path)
    return losses, state


@pytest.mark.parametrize(
    ("wrapper", "world_size", "changes"),
    [
        ("fsdp2", 1, {}),
        ("fsdp2", 2, {}),
        ("fsdp1", 1, {}),
        ("fsdp1", 2, {}),
        ("fsdp2", 1, {"gradient_accumulation_steps": 4}),
        ("fsdp2", 2, {"gradient_accumulation_steps": 2}),
        ("fsdp1", 2, {"gradient_accumulation_steps": 2}),
        ("fsdp2", 4, {}),
    ],
)
def test_losses_are_those_of_a_plain_loop(
    tmp_path: Path,
    reference: tuple[list[float], dict[str, dict[str, Tensor]]],
    wrapper: str,
    world_size: int,
    changes: dict[str, Any],
) -> None:
    expected, _ = reference
    tree = tiny_config(tmp_path, wrapper=wrapper, num_steps=NUM_STEPS, **changes)
    run_on_ranks(_run, world_size, write_config(tree, tmp_path / "config.yaml"), tmp_path, "sharded")
    assert _train_losses(tmp_path, "sharded") == pytest.approx(expected, abs=1e-6, rel=0)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
def test_every_fsdp1_strategy_trains_alike(
    tmp_path: Path, reference: tuple[list[float], dict[str, dict[str, Tensor]]], strategy: str
) -> None:
    tree = tiny_config(tmp_path, wrapper="fsdp1", num_steps=NUM_STEPS)
    tree["model"]["config"]["sharding_strategy"] = strategy
    run_on_ranks(_run, 2, write_config(tree, tmp_path / "config.yaml"), tmp_path, strategy)
    assert _train_losses(tmp_path, strategy) == pytest.approx(reference[0], abs=1e-6, rel=0)


@pytest.mark.parametrize(("replicate", "shard"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("reshard", [True, False])
def test_every_fsdp2_layout_trains_alike(
    tmp_path: Path,
    reference: tuple[list[float], dict[str, dict[str, Tensor]]],
    replicate: int,
    shard: int,
    reshard: bool,
) -> None:
    tree = tiny_config(tmp_path, num_steps=NUM_STEPS)
    tree["device_mesh"]["config"] |= {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
    }
    tree["sharded_model"]["config"] |= {"reshard_after_forward": reshard, "layers_per_fsdp_unit": 2}
    run_on_ranks(_run, 2, write_config(tree, tmp_path / "config.yaml"), tmp_path, "layout")
    assert _train_losses(tmp_path, "layout") == pytest.approx(reference[0], abs=1e-6, rel=0)


def test_fsdp1_optimizer_file_equals_the_state_of_a_single_process(
    tmp_path: Path, reference: tuple[list[float], dict[str, dict[str, Tensor]]]
) -> None:
    _, expected = reference
    tree = tiny_config(tmp_path, wrapper="fsdp1", num_steps=NUM_STEPS)
    run_on_ranks(_run, 2, write_config(tree, tmp_path / "config.yaml"), tmp_path, "fsdp1")
    checkpoint = checkpoints_in(tmp_path / "fsdp1" / "checkpoints")[-1]
    saved = torch.load(checkpoint.optimizer_path, weights_only=True)["state"]
    assert saved.keys() == expected.keys()
    for name, state in expected.items():
        assert int(saved[name]["step"]) == int(state["step"]) == NUM_STEPS
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(saved[name][moment], state[moment], rtol=1e-4, atol=1e-9)
        assert not torch.equal(saved[name]["exp_avg"], saved[name]["exp_avg_sq"])
