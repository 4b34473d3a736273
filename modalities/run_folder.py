"""A run's folder: what made the run, what it measured, what it saved."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from modalities.checkpointing.discovery import Checkpoint, checkpoints_in, locate_checkpoint
from modalities.checkpointing.history import history_of, starts_of
from modalities.checkpointing.manifest import Start
from modalities.checkpointing.paths import LAST_CHECKPOINT_INFO, parse_checkpoint_name
from modalities.checkpointing.storage import absolute, as_location
from modalities.durability import replace_file
from modalities.exceptions import CheckpointError, UserError

RUN_FILE = "run.json"


@dataclass(frozen=True)
class RunOrigin:
    """What a start of a run began from.

    Args:
        kind: ``resume`` and ``fork`` go on from all of a checkpoint, ``init`` takes its weights only.
        path: The checkpoint.
        experiment_id: That wrote it; empty if its name does not tell.
        num_seen_steps: Of it.
    """

    kind: Literal["resume", "fork", "init"]
    path: str
    experiment_id: str
    num_seen_steps: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, kind: Literal["resume", "fork", "init"]) -> RunOrigin:
        return cls(kind, str(absolute(checkpoint.path)), checkpoint.experiment_id, checkpoint.progress.num_seen_steps)

    @classmethod
    def of_weights(cls, path: Path) -> RunOrigin:
        """A start with the weights of a checkpoint, which may be of any name."""
        experiment_id, _, progress = parse_checkpoint_name(path) or ("", None, None)
        return cls("init", str(absolute(path)), experiment_id, progress.num_seen_steps if progress is not None else 0)

    def __str__(self) -> str:
        word = {"resume": "from", "fork": "fork of", "init": "weights of"}[self.kind]
        return f"{word} {self.path}"


@dataclass(frozen=True)
class RunFolder:
    """Paths inside a run's folder.

    Args:
        path: ``<experiments root>/<experiment id>``.
    """

    path: Path

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def digest_file(self) -> Path:
        return self.path / "digests.jsonl"

    @property
    def resolved_config(self) -> Path:
        return self.path / "config.resolved.yaml"

    def create(self) -> None:
        """Make the folder and prove that it can be written to.

        Raises:
            UserError: It cannot.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".write-probe"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise UserError(
                f"cannot write to the run folder {self.path}: {error.strerror}; choose another with --experiments_root_path"
            ) from error

    def remove_if_empty(self) -> None:
        """Leave nothing behind of a run that did not come about."""
        if self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def record(
        self,
        config_files: Sequence[Path],
        config_text: str,
        resolved: str,
        overrides: list[str],
        world_size: int,
        checkpoint_path: Path,
        checkpoint_experiment_id: str,
        start: Start,
        origin: RunOrigin | None,
    ) -> None:
        """Keep the config as given and resolved, the overrides, the surroundings, and where checkpoints go and come from."""
        (self.path / "config.yaml").write_text(config_text, encoding="utf-8")
        self.resolved_config.write_text(resolved, encoding="utf-8")
        (self.path / "overrides.json").write_text(json.dumps(overrides) + "\n", encoding="utf-8")
        started = {
            **_environment(world_size),
            "config_file": str(config_files[0].absolute()),
            "config_files": [str(file.absolute()) for file in config_files],
            "checkpoint_path": str(absolute(checkpoint_path)),
            "checkpoint_experiment_id": checkpoint_experiment_id,
            "start": asdict(start),
            "origin": asdict(origin) if origin is not None else None,
        }
        history = [*_history(self.path), started]
        replace_file(self.path / RUN_FILE, json.dumps(history, indent=2).encode() + b"\n")

    def starts(self) -> list[Start]:
        """Every start of the run, oldest first."""
        told = [started.get("start") for started in _history(self.path)]
        return [Start(**start) for start in told if start is not None]


def new_experiment_id(config_file: Path) -> str:
    """A name that tells the time and the config: ``2026-01-31__12-00-00_quickstart``."""
    return f"{time.strftime('%Y-%m-%d__%H-%M-%S')}_{config_file.stem}"


def find_checkpoint(path: Path, num_seen_steps: int | None = None) -> Checkpoint:
    """The checkpoint that a user means by a path: itself, or one of a run, wherever the run keeps them.

    Args:
        path: A checkpoint, or what holds some: a run's folder, a folder of checkpoints.
        num_seen_steps: Which of several; None for the newest.

    Raises:
        CheckpointError: There is none.
    """
    found = checkpoints_of_run(path)
    if num_seen_steps is None:
        if found:
            return history_of(starts_of(found), RunFolder(path).starts()).current[0]
        return locate_checkpoint(path)
    if not found:
        newest = locate_checkpoint(path)
        found = checkpoints_in(newest.path.parent, newest.experiment_id) if newest.path != path else [newest]
    at_step = [checkpoint for checkpoint in found if checkpoint.progress.num_seen_steps == num_seen_steps]
    if not at_step:
        steps = ", ".join(str(checkpoint.progress.num_seen_steps) for checkpoint in found)
        raise CheckpointError(f"no checkpoint of step {num_seen_steps} in {path}; there are those of the steps {steps}")
    return at_step[-1]


def find_weights(path: Path, num_seen_steps: int | None = None) -> Path:
    """The weights that a user means by a path: those of a checkpoint or run, or files of any name.

    Args:
        path: As for :func:`find_checkpoint`, or a DCP folder, a file of full weights or safetensors of any name.
        num_seen_steps: Which of several; None for the newest.

    Raises:
        CheckpointError: There is nothing of the kind.
    """
    is_of_run = bool(checkpoints_of_run(path)) or (path / "checkpoints").is_dir()
    if num_seen_steps is not None or is_of_run or not path.exists() or path.name == LAST_CHECKPOINT_INFO:
        return find_checkpoint(path, num_seen_steps).path
    return path


def checkpoints_of_run(folder: Path) -> list[Checkpoint]:
    """Those of a run's folder, wherever the run keeps them, fewest steps first; none if it is no run's folder."""
    history = _history(folder)
    if not history:
        return []
    started = history[-1]
    return checkpoints_in(as_location(started.get("checkpoint_path", "")), started.get("checkpoint_experiment_id"))


def newest_run_of(config_file: Path, experiments_root: Path) -> Path | None:
    """The run folder that was last started from a config file, or None."""
    if not experiments_root.is_dir():
        return None
    wanted = str(config_file.absolute())
    runs = []
    for folder in experiments_root.iterdir():
        history = _history(folder)
        if history and history[-1].get("config_file") == wanted:
            runs.append((history[-1].get("started_at", ""), folder))
    return max(runs)[1] if runs else None


def _history(folder: Path) -> list[dict[str, Any]]:
    """Every start of a run, oldest first."""
    try:
        content = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # no run's folder, or one whose record a kill cut short: both are not a run to go on with
        return []
    return content if isinstance(content, list) else []


def _environment(world_size: int) -> dict[str, Any]:
    packages = ("modalities", "torch", "numpy", "pydantic", "omegaconf", "tokenizers")
    return {
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "working_directory": os.getcwd(),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "world_size": world_size,
        "git": _git_state(),
    }


def _git_state() -> dict[str, Any] | None:
    """Commit of the working directory and whether it has changes; None where it is no git checkout."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.stdout.strip(), "has_changes": bool(status.stdout.strip())}
