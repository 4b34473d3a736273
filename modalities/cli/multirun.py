"""``modalities run --multirun``."""

from __future__ import annotations

from collections.abc import Sequence

import click

from modalities.exceptions import Interrupted
from modalities.run_request import RunRequest


def run_sweep(request: RunRequest, launcher: str, slurm_parameters: Sequence[str]) -> None:
    """Validate and run every job of a sweep, then tell what came out.

    Raises:
        UserError: A job has faults, or the sweep cannot be started.
        Interrupted: Some jobs were not started, or did not finish.
    """
    from modalities.sweep import prepare, run_here, run_jobs, run_with_submitit
    from modalities.sweep_report import print_table, write_plot
    from modalities.tracking.console import console

    launch = run_with_submitit(slurm_parameters) if launcher == "submitit" else run_here
    jobs = prepare(request)
    folder = jobs[0].folder
    click.echo(f"{len(jobs)} jobs, all checked; sweep folder {folder}")
    results = run_jobs(jobs, launch)
    console.print()
    print_table(results, console)
    plot = write_plot(results, folder)
    console.print(f"results in {folder}/sweep.json" + (f", curves in {plot}" if plot else ""))
    if plot is None:
        console.print("a plot of the curves needs matplotlib: pip install 'modalities[plot]'", markup=False)
    unfinished = len(jobs) - sum(result.exit_code == 0 for result in results)
    if unfinished:
        raise Interrupted(f"{unfinished} of {len(jobs)} jobs did not finish")
