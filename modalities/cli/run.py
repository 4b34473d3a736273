"""``modalities run`` and ``modalities warmstart``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from modalities.cli.options import config_option, experiments_root_option, import_option
from modalities.run import RunRequest


@click.command()
@config_option
@experiments_root_option
@click.option(
    "--experiment_id", "--experiment-id", default=None, help="Name of the run's folder. Default: time and config."
)
@click.option(
    "--resume",
    default="none",
    show_default=True,
    help="none: a fresh run. auto: go on from the newest checkpoint of the last run of this config, if there is one. "
    "PATH: go on from that checkpoint or run folder.",
)
@click.option("--nproc", type=click.IntRange(min=1), default=None, help="Start that many processes on this machine.")
@import_option
def run(
    config: Path,
    experiments_root: Path,
    experiment_id: str | None,
    resume: str,
    nproc: int | None,
    imports: tuple[str, ...],
) -> None:
    """Train from a YAML config.

    Runs in one process; with --nproc in several on this machine; under torchrun as one of its ranks.
    """
    _start(RunRequest(config, experiments_root, experiment_id, resume), nproc, imports)


@click.command()
@config_option
@experiments_root_option
@click.option(
    "--experiment_id", "--experiment-id", default=None, help="Name of the run's folder. Default: time and config."
)
@click.option(
    "--last_checkpoint_info_file_path",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help="A last_checkpoint_info.json; the config reads it as ${warmstart_env:checkpoint_paths}.",
)
@click.option("--nproc", type=click.IntRange(min=1), default=None, help="Start that many processes on this machine.")
@import_option
def warmstart(
    config: Path,
    experiments_root: Path,
    experiment_id: str | None,
    last_checkpoint_info_file_path: Path,
    nproc: int | None,
    imports: tuple[str, ...],
) -> None:
    """Train on from a checkpoint that the config itself loads."""
    request = RunRequest(config, experiments_root, experiment_id, last_checkpoint_info=last_checkpoint_info_file_path)
    _start(request, nproc, imports)


def _start(request: RunRequest, nproc: int | None, imports: tuple[str, ...]) -> None:
    from modalities.cli.checking import check_or_exit
    from modalities.cli.options import import_user_modules

    import_user_modules(imports)
    # faults are told before torch is imported, and before processes are started
    check_or_exit(request)
    if nproc is not None and "RANK" not in os.environ:
        from modalities.cli.launching import launch

        launch(nproc)
        return
    from modalities.run import run

    run(request)
