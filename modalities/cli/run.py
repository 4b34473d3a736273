"""``modalities run`` and ``modalities warmstart``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from modalities.cli.options import (
    allow_changed_option,
    experiment_id_option,
    experiments_root_option,
    max_time_option,
    nproc_option,
    takes_config,
)
from modalities.run_request import RunRequest


@click.command()
@takes_config
@experiments_root_option
@experiment_id_option
@click.option(
    "--resume",
    default="none",
    show_default=True,
    help="none: a fresh run. auto: go on from the newest checkpoint of the last run of this config, if there is one. "
    "PATH: go on from that checkpoint or run folder.",
)
@click.option(
    "--fork",
    metavar="PATH",
    help="Branch a new run off from a checkpoint or run: counters, optimizer and data position go on, in a folder of "
    "its own that records where it comes from.",
)
@click.option(
    "--init-from",
    "--init_from",
    "init_from",
    metavar="PATH",
    help="Start a new run with the weights of a checkpoint, a run, a .bin file or safetensors; all counters at zero.",
)
@click.option(
    "--at-step",
    "--at_step",
    "at_step",
    type=click.IntRange(min=0),
    help="Of --fork and --init-from with a run: which of its checkpoints; by default the newest.",
)
@click.option(
    "--check-against",
    "--check_against",
    "check_against",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Compare every logged step with that run's folder, bit for bit; end at the first step and tensor that differ.",
)
@allow_changed_option
@nproc_option
@max_time_option
@click.option("--multirun", "-m", is_flag=True, help="Run every job of a sweep: optimizer.lr=1e-4,3e-4 gives two.")
@click.option(
    "--launcher",
    type=click.Choice(["local", "submitit"]),
    default="local",
    show_default=True,
    help="Where the jobs of a sweep run: here, one after another, or as an array of SLURM jobs.",
)
@click.option(
    "--slurm",
    "slurm_parameters",
    multiple=True,
    metavar="NAME=VALUE",
    help="A parameter of submitit's executor, such as slurm_partition=gpu or timeout_min=60. May be repeated.",
)
def run(
    config: Path,
    config_folders: tuple[Path, ...],
    imports: tuple[str, ...],
    overrides: tuple[str, ...],
    experiments_root: Path,
    experiment_id: str | None,
    resume: str,
    fork: str | None,
    init_from: str | None,
    at_step: int | None,
    check_against: Path | None,
    allow_changed: tuple[str, ...],
    nproc: int | None,
    max_time_s: float | None,
    multirun: bool,
    launcher: str,
    slurm_parameters: tuple[str, ...],
) -> None:
    """Train from a YAML config.

    Runs in one process; with --nproc in several on this machine; under torchrun as one of its ranks. OVERRIDE is
    path=value, +path=value to add, ~path to remove, slot=variant to choose a component.
    """
    _check_starts(resume, fork, init_from, at_step, experiment_id)
    request = RunRequest(
        config,
        experiments_root,
        experiment_id,
        resume,
        fork,
        init_from,
        at_step,
        check_against,
        allow_changed,
        overrides=overrides,
        config_folders=config_folders,
        imports=imports,
        num_processes=nproc,
        max_time_s=max_time_s,
    )
    if multirun:
        from modalities.cli.multirun import run_sweep

        run_sweep(request, launcher, slurm_parameters)
        return
    _start(request, nproc)


@click.command()
@takes_config
@experiments_root_option
@experiment_id_option
@click.option(
    "--last_checkpoint_info_file_path",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help="A last_checkpoint_info.json; the config reads it as ${warmstart_env:checkpoint_paths}.",
)
@nproc_option
@max_time_option
def warmstart(
    config: Path,
    config_folders: tuple[Path, ...],
    imports: tuple[str, ...],
    overrides: tuple[str, ...],
    experiments_root: Path,
    experiment_id: str | None,
    last_checkpoint_info_file_path: Path,
    nproc: int | None,
    max_time_s: float | None,
) -> None:
    """Train on from a checkpoint that the config itself loads."""
    request = RunRequest(
        config,
        experiments_root,
        experiment_id,
        last_checkpoint_info=last_checkpoint_info_file_path,
        overrides=overrides,
        config_folders=config_folders,
        imports=imports,
        num_processes=nproc,
        max_time_s=max_time_s,
    )
    _start(request, nproc)


def _check_starts(
    resume: str, fork: str | None, init_from: str | None, at_step: int | None, experiment_id: str | None
) -> None:
    """A run begins in one way."""
    if fork is not None and init_from is not None:
        raise click.UsageError("--fork goes on from all of a checkpoint, --init-from takes its weights only; give one")
    if at_step is not None and fork is None and init_from is None:
        raise click.UsageError("--at-step tells which checkpoint of --fork or --init-from; give one of them")
    if fork is None and init_from is None:
        return
    word = "--fork" if fork is not None else "--init-from"
    if resume not in ("none", "auto"):
        raise click.UsageError(f"{word} begins a new run, --resume {resume} goes on with one; give one of them")
    if resume == "auto" and experiment_id is None:
        raise click.UsageError(
            f"{word} with --resume auto begins the run once and then goes on with it: name it by --experiment_id"
        )


def _start(request: RunRequest, nproc: int | None) -> None:
    from modalities.cli.checking import check_or_exit

    # faults are told before torch is imported, and before processes are started
    check_or_exit(request)
    if nproc is not None and "RANK" not in os.environ:
        from modalities.cli.launching import launch

        launch(nproc, request)
        return
    from modalities.run import run

    run(request)
