"""How long `modalities --help` and `check` take, against importing torch: medians of alternating runs.

Usage: python benchmarks/start_up.py [--repeats N]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "import torch": [sys.executable, "-c", "import torch"],
    "modalities --help": [sys.executable, "-m", "modalities", "--help"],
    "modalities components": [sys.executable, "-m", "modalities", "components"],
    "modalities check": [
        sys.executable,
        "-m",
        "modalities",
        "check",
        "--config",
        "config_files/training/quickstart.yaml",
    ],
}


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    durations: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(repeats + 1):
        for name, command in COMMANDS.items():
            durations[name].append(seconds(command))
    print(f"{'command':<24} {'median s':>9} {'of import torch':>16}")
    for name, measured in durations.items():
        # the first round warms the disk cache
        ratios = [own / torch for own, torch in zip(measured[1:], durations["import torch"][1:], strict=True)]
        print(f"{name:<24} {statistics.median(measured[1:]):>9.3f} {statistics.median(ratios):>16.2f}")


if __name__ == "__main__":
    main()
