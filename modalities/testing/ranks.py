"""Real process groups on one machine, for tests: gloo ranks that are forked and meet through a file."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class RankFailure(AssertionError):
    """A rank raised, died or hung; the message has every rank's end."""


def run_on_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 60) -> list[Any]:
    """Call a function on every rank of a fresh process group.

    Args:
        function: Called with the arguments, in a process of its own per rank.
        world_size: Number of ranks.
        arguments: The same on all ranks.
        timeout_s: After it the ranks are killed.

    Returns:
        What the function returned, by rank.

    Raises:
        RankFailure: A rank raised, died or did not end in time.
    """
    context = multiprocessing.get_context("fork")
    # a rank must not collect what its parent left, such as process groups whose threads it does not have
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        processes, connections = [], []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            arguments_of_rank = (function, rank, world_size, Path(folder) / "rendezvous", theirs, arguments)
            process = context.Process(target=_run_rank, args=arguments_of_rank, daemon=False)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(mine)
        gc.unfreeze()
        try:
            return _collect(processes, connections, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _run_rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    rendezvous: Path,
    connection: Connection,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=30),
        )
        result = ("returned", function(*arguments))
        dist.barrier()
    except BaseException:
        result = ("raised", traceback.format_exc())
    # plain bytes: torch would send tensors as handles that end with this process
    connection.send_bytes(pickle.dumps(result))
    connection.close()
    # the interpreter's exit would run the parent's handlers
    os._exit(0)


def _collect(processes: list[Any], connections: list[Connection], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    outcomes: list[tuple[str, Any]] = []
    for process, connection in zip(processes, connections, strict=True):
        try:
            if connection.poll(max(0.0, deadline - time.monotonic())):
                outcomes.append(pickle.loads(connection.recv_bytes()))
            else:
                outcomes.append(("hung", f"no answer within {timeout_s} s"))
        except EOFError:
            process.join(5)
            outcomes.append(("died", f"exit code {process.exitcode}"))
        if outcomes[-1][0] != "returned":
            # the others are stuck waiting for it
            deadline = min(deadline, time.monotonic() + 5)
    if any(kind != "returned" for kind, _ in outcomes):
        report = "\n".join(f"rank {rank} {kind}: {what}" for rank, (kind, what) in enumerate(outcomes))
        raise RankFailure(report)
    return [value for _, value in outcomes]
