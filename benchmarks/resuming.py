"""What going on costs: reaching a sample far away, and a deterministic run.

Usage: python benchmarks/resuming.py [--repeats N]     (from the repository's root)

The first table: milliseconds from a sampler's making to its first sample, medians. Everything runs in one process,
alternating. The second: a training step of the quickstart's model with and without ``settings.deterministic``, and the
digests of its weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from modalities.composition.compose import ConfigRequest, compose_config
from modalities.config.environment import Environment
from modalities.data.samplers import ResumableDistributedSampler
from modalities.data.settings import ShuffleMethod
from modalities.factory.build import build
from modalities.parallel.process_group import machine_device, process_group
from modalities.run import plan_of
from modalities.training.assembly import make_trainer
from modalities.training.determinism import deterministic, weight_digests
from modalities.training.recipe import TrainingRecipe
from modalities.training.trainer import IntervalFigures

BILLION = 10**9
WARM_UP = 3


class Synthetic(Sized):
    """A dataset that is nothing but its length."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples


def first_sample_ms(num_samples: int, position: int, **fields: Any) -> float:
    start = time.perf_counter()
    dataset: Any = Synthetic(num_samples)
    next(ResumableDistributedSampler(dataset, 3, 8, **fields).stream(position))
    return (time.perf_counter() - start) * 1000


def skipping(repeats: int) -> Table:
    table = Table("order", "samples", "to sample 0, ms", "to sample 10^6, ms", "to sample 10^9, ms", title="reaching n")
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("in file order", BILLION, {"shuffle": False}),
        ("feistel", BILLION, {"shuffle": True, "shuffle_method": ShuffleMethod.FEISTEL}),
        ("randperm", 10**6, {"shuffle": True}),
        ("randperm", 10**7, {"shuffle": True}),
    ]
    for name, num_samples, fields in cases:
        positions = (0, 10**6, BILLION)
        rounds = [[first_sample_ms(num_samples, p, **fields) for p in positions] for _ in range(repeats)]
        medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
        table.add_row(name, f"{num_samples:,}", *(f"{value:.3f}" for value in medians))
    return table


def determinism(repeats: int) -> Table:
    config = Path("config_files/training/quickstart.yaml")
    with tempfile.TemporaryDirectory() as folder, process_group():
        torch.manual_seed(0)
        request = ConfigRequest(Environment(config, Path(folder), "benchmark"))
        recipe = build(plan_of(compose_config(request, TrainingRecipe)), TrainingRecipe)
        trainer = make_trainer(recipe, machine_device(), [])
        batches = recipe.train_dataloader.stream(0)
        figures = IntervalFigures(trainer.device)

        def step(is_deterministic: bool) -> float:
            with deterministic(is_deterministic):
                return seconds(lambda: trainer.step(batches, figures))

        for _ in range(WARM_UP):
            step(False)
            step(True)
        rounds = [(step(False), step(True), seconds(lambda: weight_digests(recipe.app_state))) for _ in range(repeats)]
    plain, strict, digests = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(b / a for a, b, _ in rounds)
    table = Table("what", "ms", "to a plain step", title="settings.deterministic")
    table.add_row("a step", f"{plain * 1000:.1f}", "1.00")
    table.add_row("a deterministic step", f"{strict * 1000:.1f}", f"{ratio:.2f}")
    table.add_row("digests of a logged step", f"{digests * 1000:.1f}", f"{digests / plain:.2f}")
    return table


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    console = Console()
    console.print(skipping(repeats))
    console.print(determinism(repeats))


if __name__ == "__main__":
    main()
