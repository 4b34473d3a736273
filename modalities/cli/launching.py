"""Starting several processes on this machine through torch's elastic launcher."""

from __future__ import annotations

import logging
import os
import sys

from modalities.cli.main import EXIT_USER_ERROR


def launch(num_processes: int) -> None:
    """Run this very command once per rank and wait; exits as the first failing rank did.

    Args:
        num_processes: Ranks on this machine.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # the launcher tells each failure in a page of its own; ours is told by the rank itself
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    os.environ["MODALITIES_CHECKED"] = "1"
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
    try:
        elastic_launch(config, sys.executable)("-m", "modalities", *sys.argv[1:])
    except ChildFailedError as failed:
        exit_codes = [failure.exitcode for failure in failed.failures.values()]
        sys.exit(EXIT_USER_ERROR if exit_codes and all(code == EXIT_USER_ERROR for code in exit_codes) else 1)
