"""Killing a run again and again: whatever the moment, it goes on to the weights of a run that was never killed.

python -m tests.end_to_end.soak [--rounds 200] [--wrapper fsdp2] [--seed 0]
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import random
import signal
import socket
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from modalities.checkpointing.comparison import compare
from modalities.checkpointing.discovery import checkpoints_in, locate_checkpoint
from modalities.checkpointing.reading.sources import open_source
from modalities.exceptions import UserError
from modalities.run import RunRequest, run
from modalities.testing.tiny import tiny_config, write_config

WORLD_SIZE = 2
STEPS_OF_A_ROUND = 5
"""Up to so many checkpoints are waited for before the kill."""
START_S = 3.0
"""About what a start takes: kills of rounds that wait for no checkpoint fall within it."""
LEAVES_WITHIN_S = 20.0
"""After one rank was killed the other leaves by itself."""


@dataclass
class Soaked:
    """How it went.

    Args:
        num_kills_by_rank: Rounds by what was killed: a rank, or all (None).
        num_before_a_step: Kills that came before the round's first checkpoint.
        seconds_to_leave: What the rank that was not killed took to end.
        num_steps: Of the whole run.
    """

    num_kills_by_rank: dict[int | None, int] = field(default_factory=dict)
    num_before_a_step: int = 0
    seconds_to_leave: list[float] = field(default_factory=list)
    num_steps: int = 0


def soak(folder: Path, num_rounds: int, seed: int, wrapper: str = "fsdp2") -> Soaked:
    """Kill, resume and compare.

    Args:
        folder: Empty.
        num_rounds: How often the run is killed.
        seed: Of the moments.
        wrapper: ``fsdp1`` or ``fsdp2``.

    Raises:
        AssertionError: A resumed run fails, hangs, or comes to other weights.
    """
    # several steps are made until a kill that waits for one
    num_steps = num_rounds * STEPS_OF_A_ROUND * 2 + 10
    tree = tiny_config(folder, wrapper=wrapper, num_steps=num_steps, checkpointing_interval=1, dropout=0.2)
    tree["settings"]["intervals"]["evaluation_interval_in_steps"] = num_steps
    tree["checkpoint_saving"]["config"]["checkpoint_saving_strategy"]["config"]["k"] = 2
    config = write_config(tree, folder / "config.yaml")
    _finish(_start(config, "unbroken"))
    moments, soaked = random.Random(seed), Soaked(num_steps=num_steps)
    checkpoints = folder / "killed" / "checkpoints"
    for _ in range(num_rounds):
        step_before = _newest_step(checkpoints)
        ranks = _start(config, "killed")
        _wait_for_step(checkpoints, step_before + moments.randrange(STEPS_OF_A_ROUND), ranks)
        goes_on = _newest_step(checkpoints) > step_before
        time.sleep(moments.uniform(0, 0.05 if goes_on else START_S))
        soaked.num_before_a_step += _newest_step(checkpoints) == step_before
        victim = moments.choice([0, 1, None])
        soaked.num_kills_by_rank[victim] = soaked.num_kills_by_rank.get(victim, 0) + 1
        for rank, process in enumerate(ranks):
            if victim in (None, rank):
                os.kill(process, signal.SIGKILL)
        soaked.seconds_to_leave.append(_wait_until_left(ranks, folder))
        assert _newest_step(checkpoints) < num_steps, "the run was done before its last kill"
    _finish(_start(config, "killed"))
    ended = [locate_checkpoint(folder / name) for name in ("unbroken", "killed")]
    assert [c.progress.num_seen_steps for c in ended] == [num_steps] * 2
    first, second = (open_source(checkpoint.path) for checkpoint in ended)
    different = [told for told in compare(first, second) if told.status != "equal"]
    assert not different, different
    assert _losses(folder / "killed") == _losses(folder / "unbroken")
    leftovers = [path.name for path in checkpoints.iterdir() if path.name.startswith(".")]
    assert not leftovers, leftovers
    return soaked


def _start(config: Path, experiment_id: str) -> list[int]:
    """Fork the ranks of a run; they go on from its newest checkpoint."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    gc.freeze()  # a rank must not collect what its parent left
    for rank in range(WORLD_SIZE):
        process = os.fork()
        if process == 0:
            os._exit(_be_a_rank(config, experiment_id, rank, port))
        ranks.append(process)
    gc.unfreeze()
    return ranks


def _be_a_rank(config: Path, experiment_id: str, rank: int, port: int) -> int:
    log = os.open(config.parent / f"{experiment_id}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE), LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        run(RunRequest(config, config.parent, experiment_id, resume="auto"))
    except UserError as error:
        print(error, flush=True)
        return 2
    except Exception as error:
        print(repr(error), flush=True)
        return 1
    return 0


def _finish(ranks: list[int]) -> None:
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]
    assert codes == [0] * WORLD_SIZE, codes


def _losses(run_folder: Path) -> list[tuple[int, dict[str, float]]]:
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [(line["num_train_steps_done"], line["losses"]) for line in lines]


def _newest_step(checkpoints: Path) -> int:
    found = checkpoints_in(checkpoints)
    return found[-1].progress.num_seen_steps if found else 0


def _wait_for_step(checkpoints: Path, step: int, ranks: list[int]) -> None:
    deadline = time.monotonic() + 60
    while _newest_step(checkpoints) < step:
        assert time.monotonic() < deadline, f"no checkpoint of step {step}"
        for process in ranks:
            assert os.waitpid(process, os.WNOHANG) == (0, 0), "a rank has left before it was killed"
        time.sleep(0.002)


def _wait_until_left(ranks: list[int], folder: Path) -> float:
    begun = time.monotonic()
    left: set[int] = set()
    while len(left) < len(ranks):
        for process in ranks:
            if process not in left and os.waitpid(process, os.WNOHANG) != (0, 0):
                left.add(process)
        if time.monotonic() > begun + LEAVES_WITHIN_S:
            raise AssertionError(f"a rank hangs after the other was killed:\n{_where_it_is(set(ranks) - left, folder)}")
        time.sleep(0.01)
    return time.monotonic() - begun


def _where_it_is(processes: set[int], folder: Path) -> str:
    """What the processes have told, and their stacks; they are ended."""
    for process in processes:
        os.kill(process, signal.SIGUSR2)
    time.sleep(1)
    for process in processes:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return "\n".join(f"{path.name}\n{path.read_text()}" for path in sorted(folder.glob("killed.*.log")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--wrapper", choices=["fsdp1", "fsdp2"], default="fsdp2")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        soaked = soak(Path(name), options.rounds, options.seed, options.wrapper)
    kills = ", ".join(
        f"{'both ranks' if rank is None else f'rank {rank}'} {number}"
        for rank, number in sorted(soaked.num_kills_by_rank.items(), key=str)
    )
    print(
        f"{options.rounds} kills of a {options.wrapper} run of {soaked.num_steps} steps in "
        f"{time.monotonic() - begun:.0f} s: {kills}; {soaked.num_before_a_step} before the first checkpoint of their "
        f"round; longest until the other rank had left {max(soaked.seconds_to_leave):.1f} s; final state bitwise that "
        "of the run that was never killed"
    )


if __name__ == "__main__":
    main()
