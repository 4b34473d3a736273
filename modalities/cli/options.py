"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

C = TypeVar("C", bound=Callable[..., Any])

config_option = click.option(
    "--config",
    "--config_file_path",
    "config",
    type=click.Path(path_type=Path),
    required=True,
    help="The experiment's YAML file.",
)

config_folder_option = click.option(
    "--config-dir",
    "config_folders",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    multiple=True,
    metavar="FOLDER",
    help="A further folder with groups for `defaults:` lists. May be repeated.",
)

experiments_root_option = click.option(
    "--experiments_root_path",
    "--experiments-root-path",
    "experiments_root",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("experiments"),
    show_default=True,
    help="Folder that holds the run folders.",
)

experiment_id_option = click.option(
    "--experiment_id", "--experiment-id", default=None, help="Name of the run's folder. Default: time and config."
)

nproc_option = click.option(
    "--nproc", type=click.IntRange(min=1), default=None, help="Start that many processes on this machine."
)

import_option = click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE",
    help="A module, or the path of a .py file, that registers components of your own. May be repeated.",
)

overrides_argument = click.argument("overrides", nargs=-1, metavar="[OVERRIDE]...")


def takes_config(command: C) -> C:
    """Decorator: the command takes a config, groups, components of the user's own and overrides."""
    for decorate in (config_option, config_folder_option, import_option, overrides_argument):
        command = decorate(command)
    return command
