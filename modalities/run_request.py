"""What the user asked of a run, and the command that goes on with it."""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from modalities.composition.compose import ConfigRequest
from modalities.config.environment import Environment
from modalities.exceptions import UserError
from modalities.run_folder import find_checkpoint, newest_run_of

NUM_PROCESSES_VARIABLE = "MODALITIES_NPROC"
"""Set for the processes that ``--nproc`` starts, to their number."""

BEGAN_AT_VARIABLE = "MODALITIES_BEGAN_AT"
"""Set for the processes that ``--nproc`` starts, to when the launcher began (``time.monotonic``)."""


@dataclass(frozen=True)
class RunRequest:
    """What the user asked for.

    Args:
        config: The experiment's YAML file.
        experiments_root: Folder that holds the run folders.
        experiment_id: Name of the run's folder; made from the time and the config's name if not given.
        resume: ``none``, ``auto`` (the newest checkpoint of this run, if any) or the path of a checkpoint or run.
        fork: Checkpoint or run that a new run branches off from, keeping counters, optimizer and data position.
        init_from: Checkpoint or run whose weights a new run starts with.
        at_step: Which of the checkpoints of ``fork`` or ``init_from``; None for the newest.
        check_against: Another run's folder; where this run is no longer equal to it, it ends.
        allow_changed: Paths of the config that may mean something else than in the checkpoint; ``all`` for any.
        last_checkpoint_info: For a warm start whose config asks for ``${warmstart_env:checkpoint_paths}``.
        overrides: Hydra's override words, such as ``optimizer.lr=3e-4``.
        config_folders: Further folders with groups for defaults lists.
        imports: Modules and ``.py`` files that register components.
        num_processes: How many processes the run will have, where no launcher has started them yet.
        max_time_s: Seconds from the command's start after which the run saves and stops, if it has a limit.
        began_at: When the command started (``time.monotonic``).
    """

    config: Path
    experiments_root: Path = Path("experiments")
    experiment_id: str | None = None
    resume: str = "none"
    fork: str | None = None
    init_from: str | None = None
    at_step: int | None = None
    check_against: Path | None = None
    allow_changed: tuple[str, ...] = ()
    last_checkpoint_info: Path | None = None
    overrides: tuple[str, ...] = ()
    config_folders: tuple[Path, ...] = ()
    imports: tuple[str, ...] = ()
    num_processes: int | None = None
    max_time_s: float | None = None
    began_at: float = field(default_factory=lambda: float(os.environ.get(BEGAN_AT_VARIABLE, time.monotonic())))

    def with_overrides(self, overrides: tuple[str, ...]) -> RunRequest:
        return replace(self, overrides=overrides)

    @property
    def words_of_start(self) -> list[str]:
        """What the command line says of how the run begins and what it is held against, but for ``--resume``."""
        words = {
            "--fork": self.fork,
            "--init-from": self.init_from,
            "--at-step": self.at_step,
            "--check-against": self.check_against,
        }
        given = [part for word, value in words.items() if value is not None for part in (word, str(value))]
        return given + [part for path in self.allow_changed for part in ("--allow-changed", path)]

    def config_request(self, experiment_id: str) -> ConfigRequest:
        environment = Environment(
            self.config, self.experiments_root, experiment_id, self.last_checkpoint_info, self.num_processes
        )
        return ConfigRequest(environment, self.overrides, self.config_folders, self.imports)


def what_a_killed_run_left(request: RunRequest) -> str | None:
    """The newest checkpoint of the run that a request started, and how to go on from it; None if there is none."""
    if request.experiment_id is not None:
        folder: Path | None = request.experiments_root / request.experiment_id
    else:
        folder = newest_run_of(request.config, request.experiments_root)
    try:
        newest = find_checkpoint(folder) if folder is not None else None
    except UserError:
        return None
    if folder is None or newest is None:
        return None
    return f"its newest checkpoint is {newest.path.name}; go on from there with\n  {resume_command(request, folder)}"


def resume_command(request: RunRequest, run_folder: Path) -> str:
    """The command line by which a run goes on from its newest checkpoint."""
    num_processes = os.environ.get(NUM_PROCESSES_VARIABLE)
    nproc = f" --nproc {num_processes}" if num_processes else ""
    words = "".join(f" {shlex.quote(word)}" for word in _repeated_words(request))
    config, root = shlex.quote(str(request.config)), shlex.quote(str(request.experiments_root))
    return (
        f"modalities run --config {config} --experiments_root_path {root} "
        f"--experiment_id {shlex.quote(run_folder.name)}{nproc} --resume auto{words}"
    )


def _repeated_words(request: RunRequest) -> list[str]:
    """What the command line must say again for the run to go on as it was."""
    words = [word for name in request.imports for word in ("--import", name)]
    words += [word for folder in request.config_folders for word in ("--config-dir", str(folder))]
    return [*words, *request.overrides, *request.words_of_start]
