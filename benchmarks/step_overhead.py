"""A training step of modalities against a bare PyTorch loop: same model, batches and optimizer, alternating in one run.

Usage: python benchmarks/step_overhead.py [--config FILE] [--steps N]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from modalities.composition.compose import ConfigRequest, compose_config
from modalities.config.environment import Environment
from modalities.factory.build import build
from modalities.parallel.process_group import machine_device, process_group
from modalities.run import plan_of
from modalities.training.assembly import make_trainer
from modalities.training.recipe import TrainingRecipe
from modalities.training.trainer import IntervalFigures

WARM_UP = 3


def built(config: Path, root: Path) -> Any:
    torch.manual_seed(0)
    loaded = compose_config(ConfigRequest(Environment(config, root, "benchmark")), TrainingRecipe)
    return build(plan_of(loaded), TrainingRecipe)


def bare_step(recipe: Any) -> Callable[[], None]:
    model = recipe.app_state.model_parts[0]
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.95), fused=True)
    batches = recipe.train_dataloader.stream(0)

    def step() -> None:
        batch = next(batches)
        logits = model(next(iter(batch.samples.values())))
        loss = F.cross_entropy(logits.flatten(0, 1), next(iter(batch.targets.values())).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def our_step(recipe: Any) -> Callable[[], None]:
    trainer = make_trainer(recipe, machine_device(), [])
    batches = recipe.train_dataloader.stream(0)
    figures = IntervalFigures(trainer.device)
    return lambda: trainer.step(batches, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("config_files/training/quickstart.yaml"))
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    with process_group(), tempfile.TemporaryDirectory() as root:
        steps = {
            "bare PyTorch loop": bare_step(built(arguments.config, Path(root))),
            "modalities": our_step(built(arguments.config, Path(root))),
        }
        durations: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(arguments.steps + WARM_UP):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                durations[name].append(time.perf_counter() - start)
    bare, ours = (measured[WARM_UP:] for measured in durations.values())
    print(f"{'loop':<20} {'median ms':>10} {'of bare':>8}")
    print(f"{'bare PyTorch loop':<20} {statistics.median(bare) * 1e3:>10.1f} {1:>8.3f}")
    ratio = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
    print(f"{'modalities':<20} {statistics.median(ours) * 1e3:>10.1f} {ratio:>8.3f}")


if __name__ == "__main__":
    main()
