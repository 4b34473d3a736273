"""Options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

C = TypeVar("C", bound=Callable[..., Any])

_UNITS = {"": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

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


class Size(click.ParamType):
    """``5GB``, ``500 MB``, or a number of bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|kB|KB|MB|GB|TB)", value.strip())
        num_bytes = int(float(match[1]) * _UNITS[match[2]]) if match is not None else 0
        if num_bytes < 1:
            self.fail(f"{value!r} is no size; write 5GB, 500MB, or a number of bytes", param, ctx)
        return num_bytes


class _Duration(click.ParamType):
    """``3600``, ``90m``, ``23h30m`` or ``1d``, in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", str(value))
        if match is None or not any(match.groups()):
            self.fail(f"{value!r} is no duration: write seconds, or such as 90m, 23h30m, 1d", param, ctx)
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


max_time_option = click.option(
    "--max-time",
    "max_time_s",
    type=_Duration(),
    default=None,
    help="Save and stop before so much time has passed since the start, such as 23h30m; for queues with a limit. "
    "In a sweep it holds for each job.",
)


def _words_of_changes(_ctx: click.Context, _param: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    for word in words:
        if "=" in word:
            raise click.BadParameter(f"{word} is an override; put overrides first, or name what may change by its path")
    return words


allow_changed_option = click.option(
    "--allow-changed",
    "--allow_changed",
    "allow_changed",
    multiple=True,
    is_flag=False,
    flag_value="all",
    metavar="[PATH]",
    callback=_words_of_changes,
    help="Go on though the config means something else than the checkpoint's at PATH, such as optimizer.lr; may be "
    "repeated. Without PATH: whatever has changed.",
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
