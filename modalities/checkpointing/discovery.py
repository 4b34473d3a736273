"""Finding checkpoints on the disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from modalities.checkpointing import paths
from modalities.checkpointing.history import history_of, starts_of
from modalities.checkpointing.manifest import MANIFEST_FILE
from modalities.checkpointing.storage import as_location, is_remote
from modalities.exceptions import CheckpointError
from modalities.progress import TrainingProgress


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint.

    Args:
        path: The folder of a DCP checkpoint, or the model file of an FSDP1 checkpoint.
        experiment_id: The experiment that wrote it.
        progress: What its name tells (samples are 0).
    """

    path: Path
    experiment_id: str
    progress: TrainingProgress

    @classmethod
    def of_folder(cls, folder: Path) -> Checkpoint:
        """The DCP checkpoint in a folder, whatever its name."""
        parsed = paths.parse_checkpoint_name(folder)
        experiment_id, _, progress = parsed or ("", None, TrainingProgress(0, 0, 0, 0))
        return cls(folder, experiment_id, progress)

    @property
    def is_distributed(self) -> bool:
        """Whether it is a DCP folder."""
        return self.path.is_dir()

    @property
    def folder(self) -> Path:
        """What the names in the manifest are relative to."""
        return self.path if self.is_distributed else self.path.parent

    @property
    def manifest_path(self) -> Path:
        """The manifest, which checkpoints from elsewhere do not have."""
        if self.is_distributed:
            return self.path / MANIFEST_FILE
        return self._sibling(paths.MANIFEST_ENTITY)

    @property
    def optimizer_path(self) -> Path:
        """The optimizer file of an FSDP1 checkpoint."""
        return self._sibling("optimizer")

    @property
    def resume_state_path(self) -> Path:
        """The file with random states and counters."""
        if self.is_distributed:
            return self.path / paths.RESUME_STATE_FILE
        return self._sibling(paths.RESUME_STATE_ENTITY)

    def _sibling(self, entity: str) -> Path:
        return self.path.with_name(paths.checkpoint_name(self.experiment_id, self.progress, entity))


def checkpoints_in(folder: Path, experiment_id: str | None = None) -> list[Checkpoint]:
    """Committed checkpoints directly in a folder, fewest steps first.

    Args:
        folder: May be absent.
        experiment_id: Only those of this experiment.
    """
    if not folder.is_dir():
        return []
    found = [c for path in folder.iterdir() if (c := _as_checkpoint(path)) is not None]
    return sorted(
        (c for c in found if experiment_id is None or c.experiment_id == experiment_id),
        key=lambda c: (c.progress, c.path),
    )


def locate_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint that a user means: itself, or the newest in a run's or a checkpoints' folder.

    Args:
        path: A DCP folder, an FSDP1 model file, a ``last_checkpoint_info.json``, a folder of checkpoints or of a run.

    Raises:
        CheckpointError: There is none.
    """
    if not path.exists():
        raise CheckpointError(f"no such checkpoint or run folder: {path}")
    checkpoint = _as_checkpoint(path)
    if checkpoint is not None:
        return checkpoint
    if path.is_dir() and (path / ".metadata").is_file():
        raise CheckpointError(
            f"{path.name} is not named like a checkpoint ({paths.CHECKPOINT_FOLDER_STRUCTURE}), so its step is unknown"
        )
    if path.name == paths.LAST_CHECKPOINT_INFO:
        return _pointed_at(path)
    if path.is_dir():
        found = checkpoints_in(path) or checkpoints_in(path / "checkpoints")
        if found:
            of_one = [checkpoint for checkpoint in found if checkpoint.experiment_id == found[-1].experiment_id]
            return history_of(starts_of(of_one)).current[0]
        raise CheckpointError(f"no checkpoint in {path}; one is named eid_<experiment>-seen_steps_<n>-…")
    raise CheckpointError(f"{path} is neither a checkpoint nor a folder that holds one")


def path_in_info(path: Path) -> Path:
    """The checkpoint that a ``last_checkpoint_info.json`` names.

    Raises:
        CheckpointError: It names none.
        OSError: It cannot be read.
    """
    try:
        info = json.loads(path.read_bytes())
        return as_location(info.get("checkpoint_folder_path") or info["model_checkpoint_path"])
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        message = f"{path} names neither checkpoint_folder_path nor model_checkpoint_path"
        raise CheckpointError(message) from error


def _pointed_at(pointer: Path) -> Checkpoint:
    try:
        target = path_in_info(pointer)
    except OSError as error:
        raise CheckpointError(f"{pointer} cannot be read: {error.strerror or error}") from error
    if target.name == paths.LAST_CHECKPOINT_INFO:
        raise CheckpointError(f"{pointer} names another pointer, {target}, and no checkpoint")
    return locate_checkpoint(target)


def _as_checkpoint(path: Path) -> Checkpoint | None:
    parsed = paths.parse_checkpoint_name(path)
    if parsed is None:
        return None
    experiment_id, entity, progress = parsed
    checkpoint = Checkpoint(path, experiment_id, progress)
    if entity is None and is_remote(path):
        # what a killed save left in a store of objects lacks its manifest
        return checkpoint if checkpoint.manifest_path.is_file() else None
    # one that has a manifest was whole once: what it lacks now is told when it is read
    if entity is None:
        return checkpoint if (path / ".metadata").is_file() or checkpoint.manifest_path.is_file() else None
    if entity == "model" and path.is_file():
        is_pair = checkpoint.optimizer_path.is_file() or checkpoint.manifest_path.is_file()
        return checkpoint if is_pair else None
    return None
