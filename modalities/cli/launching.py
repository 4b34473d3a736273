"""Starting several processes on this machine through torch's elastic launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

import click

from modalities.cli.main import EXIT_LOST_ANOTHER_RANK, EXIT_USER_ERROR
from modalities.exceptions import Interrupted
from modalities.run_request import BEGAN_AT_VARIABLE, NUM_PROCESSES_VARIABLE, RunRequest, what_a_killed_run_left


def launch(num_processes: int, request: RunRequest) -> None:
    """Run this very command once per rank and wait; exits as the first failing rank did.

    Args:
        num_processes: Ranks on this machine.
        request: Of this command.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # the launcher tells each failure in a page of its own; ours is told by the rank itself
    for name in ("agent.server.api", "multiprocessing.api", "multiprocessing.errors"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    os.environ[NUM_PROCESSES_VARIABLE] = str(num_processes)
    os.environ[BEGAN_AT_VARIABLE] = str(request.began_at)
    if sys.platform == "linux":
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, _pass_on)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="modalities",
        max_restarts=0,
        monitor_interval=0.2,
    )
    if sys.platform == "linux" and hasattr(config, "signals_to_handle"):
        # torch would give the ranks half a minute; they end on their own when they have saved
        config.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"
    try:
        elastic_launch(config, sys.executable)("-m", "modalities", *sys.argv[1:])
    except SignalException as stopped:
        raise Interrupted(f"stopped by {stopped.sigval.name}") from stopped
    except ChildFailedError as failed:
        # the others were ended because of it
        for rank, failure in failed.failures.items():
            if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:
                _tell_of_kill(rank, -failure.exitcode, request)
                sys.exit(1)
        # a rank that lost another is not the cause, even where the launcher noticed it first
        causes = [failure for failure in failed.failures.values() if failure.exitcode != EXIT_LOST_ANOTHER_RANK]
        if not causes:
            ranks = ", ".join(map(str, failed.failures))
            click.echo(f"error: rank {ranks} lost the connection to another rank, which has not told why", err=True)
            sys.exit(1)
        first = min(causes, key=lambda failure: failure.timestamp)
        sys.exit(EXIT_USER_ERROR if first.exitcode == EXIT_USER_ERROR else 1)


def _tell_of_kill(rank: int, number: int, request: RunRequest) -> None:
    """A rank that was killed could not tell so itself."""
    why = " (out of memory, or by hand)" if number == signal.SIGKILL else ""
    click.echo(
        f"error: rank {rank} was killed by {signal.Signals(number).name}{why}; the other ranks were ended", err=True
    )
    if (left := what_a_killed_run_left(request)) is not None:
        click.echo(left, err=True)


def _pass_on(number: int, _frame: FrameType | None) -> None:
    """Give a scheduler's signal to the ranks, which save and end."""
    for thread in Path("/proc/self/task").glob("*/children"):
        for child in thread.read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(child), number)
