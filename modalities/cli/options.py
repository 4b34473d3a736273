"""Options that several commands share."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import click

from modalities.exceptions import UserError

config_option = click.option(
    "--config",
    "--config_file_path",
    "config",
    type=click.Path(path_type=Path),
    required=True,
    help="The experiment's YAML file.",
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

import_option = click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE",
    help="A module, or the path of a .py file, that registers components of your own. May be repeated.",
)


def import_user_modules(names: tuple[str, ...]) -> None:
    """Import modules so that their ``@register``-ed components are known.

    Raises:
        UserError: A module is not there.
    """
    for name in names:
        if name.endswith(".py"):
            _import_file(Path(name))
            continue
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise UserError(f"--import {name}: {error}; give a module on the Python path or a .py file") from error


def _import_file(file: Path) -> None:
    if not file.is_file():
        raise UserError(f"--import {file}: no such file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
