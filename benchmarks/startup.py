"""What it costs to start: CPU time of each command against importing torch, and against importing the config libraries.

Usage: python benchmarks/startup.py [--repeats N]     (from the repository's root)

Runs alternate; the first round warms the disk cache and is left out. Ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODALITIES = [sys.executable, "-m", "modalities"]
QUICKSTART = "config_files/training/quickstart.yaml"
TORCH, LIBRARIES, FIRST_STEP = "import torch", "import pydantic, omegaconf", "run, to the first step"


def cpu_seconds(command: list[str]) -> float:
    """User and system time of one child process."""
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def wall_seconds_to_first_step(folder: Path) -> float:
    """From the start of the process to the first logged step."""
    words = [*MODALITIES, "run", "--config", QUICKSTART, "--experiments_root_path", str(folder)]
    words += ["training_target.num_target_steps=2", "lr_scheduler.warmup_steps=1", "checkpoint_saving=none"]
    words += [
        "intervals.training_log_interval_in_steps=1",
        "model.n_layer=1",
        "intervals.checkpointing_interval_in_steps=2",
    ]
    start = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if re.match(r"step 1/2 ", line):
                seconds = time.perf_counter() - start
        process.wait()
    assert process.returncode == 0
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        resolved = folder / "resolved.yaml"
        shown = subprocess.run([*MODALITIES, "config", "show", "--config", QUICKSTART], capture_output=True, text=True)
        resolved.write_text(shown.stdout)
        three = ["optimizer.lr=1e-3", "model.n_layer=2", "training_target.num_target_steps=100"]
        commands = {
            TORCH: [sys.executable, "-c", "import torch"],
            LIBRARIES: [sys.executable, "-c", "import pydantic, omegaconf"],
            "--help": [*MODALITIES, "--help"],
            "components": [*MODALITIES, "components"],
            "check, one file": [*MODALITIES, "check", "--config", str(resolved)],
            "check, with 3 overrides": [*MODALITIES, "check", "--config", str(resolved), *three],
            "check, defaults list": [*MODALITIES, "check", "--config", QUICKSTART],
            "check, 12 jobs of a sweep": [
                *MODALITIES,
                "check",
                "-m",
                "--config",
                str(resolved),
                "optimizer.lr=range(1,13)",
            ],
        }
        measured: dict[str, list[float]] = {label: [] for label in [*commands, FIRST_STEP]}
        walls: list[float] = []
        for _ in range(repeats + 1):
            for label, command in commands.items():
                measured[label].append(cpu_seconds(command))
            start = time.perf_counter()
            subprocess.run(commands[TORCH], check=True)
            walls.append(time.perf_counter() - start)
            measured[FIRST_STEP].append(wall_seconds_to_first_step(folder))
    print(f"{'':<28} {'median s':>9} {'/ import torch':>15} {'/ import pydantic, omegaconf':>30}")
    for label, seconds in measured.items():
        torch = walls if label == FIRST_STEP else measured[TORCH]
        row = f"{label:<28} {statistics.median(seconds[1:]):>9.3f} {_ratio(seconds, torch):>15.2f}"
        print(
            row + (f" {_ratio(seconds, measured[LIBRARIES]):>30.2f}" if label != FIRST_STEP else " (wall time, both)")
        )


def _ratio(seconds: list[float], reference: list[float]) -> float:
    return statistics.median(own / other for own, other in zip(seconds[1:], reference[1:], strict=True))


if __name__ == "__main__":
    main()
