"""Modules that register components of the user's own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path

from modalities.config.faults import Fault
from modalities.config.tree import Node
from modalities.exceptions import RegistrationError, UserError

IMPORTS = "imports"


def import_modules(names: tuple[str, ...]) -> None:
    """Import modules, or ``.py`` files, so that their ``@register``-ed components are known.

    Raises:
        UserError: One is not there, or fails; the message names its line.
    """
    for name in names:
        _import(name)


def import_named_in(root: Node, faults: list[Fault]) -> list[str]:
    """Import the modules of the config's ``imports:`` entry, and take the entry out of the tree.

    Returns:
        Their names. Only modules that Python finds can be named, not files: a config should not bring code along unseen.
    """
    entry = root.value.pop(IMPORTS, None)
    if entry is None:
        return []
    imported: list[str] = []
    items = entry.value if isinstance(entry.value, list) else [entry]
    for item in items:
        if not isinstance(item.value, str) or not all(part.isidentifier() for part in item.value.split(".")):
            message = f"`{item.plain()}` is no module name"
            hint = "name modules as Python does, my_package.components; a file is given by --import FILE.py"
            span = len(str(item.value))
            faults.append(Fault("import", message, (IMPORTS,), item.place, span, [hint]))
            continue
        try:
            _import(item.value)
            imported.append(item.value)
        except UserError as error:
            faults.append(Fault("import", str(error), (IMPORTS,), item.place, len(item.value)))
    return imported


def _import(name: str) -> None:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        if name.endswith(".py"):
            _import_file(Path(name))
        else:
            importlib.import_module(name)
    except RegistrationError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            message = f"there is no module `{error.name}` to import {name} from"
            raise UserError(f"{message}; give one on the Python path, or --import FILE.py") from error
        raise UserError(f"importing {name} fails: {error} ({_last_line(error)})") from error
    except UserError:
        raise
    except SyntaxError as error:
        raise UserError(f"importing {name} fails: {error.msg} ({error.filename}:{error.lineno})") from error
    except Exception as error:
        raise UserError(f"importing {name} fails: {type(error).__name__}: {error} ({_last_line(error)})") from error


def _import_file(file: Path) -> None:
    if not file.is_file():
        raise UserError(f"--import {file}: no such file")
    loaded = sys.modules.get(file.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file.absolute()):
        return
    found = None if loaded is not None else importlib.util.find_spec(file.stem)
    if loaded is not None or (found is not None and found.origin != str(file.absolute())):
        raise UserError(f"--import {file}: `{file.stem}` is the name of another module already; rename the file")
    spec = importlib.util.spec_from_file_location(file.stem, file.absolute())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[file.stem]
        raise


def _last_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "no place known"
