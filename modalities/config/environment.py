"""What a config may ask of its surroundings: ``${cuda_env:RANK}``, ``${modalities_env:experiment_id}``, …"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from modalities.config.suggestions import did_you_mean
from modalities.exceptions import ConfigError

_LAUNCHER_DEFAULTS = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
"""What holds where no launcher has set anything: one process."""

QUESTIONS = ("cuda_env", "node_env", "oc.env", "modalities_env:experiment", "modalities_env:config_file_path")
"""Prefixes of interpolations whose answer belongs to a rank, a machine or one run: a resolved config keeps them."""


@dataclass(frozen=True)
class Environment:
    """The surroundings of one run.

    Args:
        config_file_path: The experiment's YAML file.
        experiments_root_path: Folder that holds the run folders.
        experiment_id: Name of the run's folder.
        last_checkpoint_info_file_path: Source of ``${warmstart_env:checkpoint_paths}``, if warm-starting.
        world_size: Number of processes that the run will have, where no launcher has set it yet.
    """

    config_file_path: Path
    experiments_root_path: Path
    experiment_id: str
    last_checkpoint_info_file_path: Path | None = None
    world_size: int | None = None

    RESOLVERS: ClassVar[tuple[str, ...]] = ("cuda_env", "modalities_env", "node_env", "warmstart_env")
    """What can be asked, as ``${resolver:argument}``."""

    def answer(self, resolver: str, argument: str) -> Any:
        """The answer to ``${resolver:argument}``.

        Raises:
            ValueError: There is none; the message says why.
            ConfigError: A variable of the launcher, or the checkpoint's info file, is not as it must be.
        """
        return getattr(self, f"_{resolver}")(argument)

    def _cuda_env(self, name: str) -> int | str | None:
        if name == "WORLD_SIZE" and self.world_size is not None and not os.environ.get(name):
            return self.world_size
        if name in _LAUNCHER_DEFAULTS:
            return launcher_value(name)
        return os.getenv(name)

    def _modalities_env(self, name: str) -> str:
        values = {
            "config_file_path": self.config_file_path,
            "config_folder_path": self.config_file_path.parent,
            "experiments_root_path": self.experiments_root_path,
            "experiment_id": self.experiment_id,
        }
        if name not in values:
            raise ValueError(did_you_mean(name, values, "names of modalities_env"))
        return str(values[name])

    @staticmethod
    def _node_env(name: str) -> int | None:
        if name != "num_cpus":
            raise ValueError(did_you_mean(name, ["num_cpus"], "names of node_env"))
        return os.cpu_count()

    def _warmstart_env(self, name: str) -> dict[str, Any]:
        if name != "checkpoint_paths":
            raise ValueError(did_you_mean(name, ["checkpoint_paths"], "names of warmstart_env"))
        if self.last_checkpoint_info_file_path is None:
            raise ValueError("it is known to `warmstart` and `check` with --last_checkpoint_info_file_path only")
        return read_checkpoint_info(self.last_checkpoint_info_file_path)


def launcher_value(name: str) -> int:
    """``RANK``, ``LOCAL_RANK`` or ``WORLD_SIZE`` as the launcher set it, else that of a single process.

    Raises:
        ConfigError: The variable is set to something that is no number.
    """
    text = os.environ.get(name, "")
    if not text:
        return _LAUNCHER_DEFAULTS[name]
    if not text.isdigit():
        raise ConfigError(f"the environment variable {name} is {text!r}, not a number; a launcher sets it")
    return int(text)


def read_checkpoint_info(path: Path) -> dict[str, Any]:
    """Content of a ``last_checkpoint_info.json``.

    Raises:
        ConfigError: It is absent or holds no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path} holds no JSON") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return content
