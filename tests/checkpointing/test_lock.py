"""One run at a time writes to a folder of checkpoints."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.fsdp.fsdp_checkpoint_saving import DCPCheckpointSaving
from modalities.checkpointing.lock import lock, unlock
from modalities.exceptions import CheckpointError
from modalities.progress import TrainingProgress


def _locking_process(folder: Path) -> int:
    """A process that has the lock until it is killed."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        lock(folder, "x")
        os.write(writing, b"locked")
        signal.pause()
        os._exit(0)
    os.read(reading, 6)
    return process


def test_a_folder_is_one_run_s_until_it_ends_however_it_ends(tmp_path: Path) -> None:
    process = _locking_process(tmp_path)
    with pytest.raises(CheckpointError, match=f"process {process} on .*another --experiment_id"):
        lock(tmp_path, "x")
    lock(tmp_path, "another")
    unlock(tmp_path, "another")
    os.kill(process, 9)
    os.waitpid(process, 0)
    lock(tmp_path, "x")
    lock(tmp_path, "x")
    unlock(tmp_path, "x")
    assert not tmp_path.exists() or list(tmp_path.iterdir()) == []


def _try_to_lock(folder: Path) -> int:
    """Exit code of a process that tries: 0 if it got the lock."""
    process = os.fork()
    if process == 0:
        try:
            lock(folder, "x")
        except CheckpointError:
            os._exit(2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_a_folder_that_was_deleted_is_locked_anew_by_the_next_save(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    model = torch.nn.Linear(2, 2)
    app_state, saving = AppState(model, torch.optim.SGD(model.parameters())), DCPCheckpointSaving(folder, "x", 0)
    saving.rehearse(app_state, 1)
    saving.save_checkpoint(app_state, TrainingProgress(1, 1, 9, 9))
    assert _try_to_lock(folder) == 2
    shutil.rmtree(folder)
    saving.save_checkpoint(app_state, TrainingProgress(2, 2, 9, 9))
    assert _try_to_lock(folder) == 2
    saving.close()
    assert _try_to_lock(folder) == 0


def test_a_save_into_a_folder_that_another_run_has_taken_meanwhile_fails(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    model = torch.nn.Linear(2, 2)
    app_state, saving = AppState(model, torch.optim.SGD(model.parameters())), DCPCheckpointSaving(folder, "x", 0)
    saving.rehearse(app_state, 1)
    shutil.rmtree(folder)
    folder.mkdir()
    process = _locking_process(folder)
    with pytest.raises(CheckpointError, match=f"another run writes checkpoints of x to .*process {process} on"):
        saving.save_checkpoint(app_state, TrainingProgress(1, 1, 9, 9))
    os.kill(process, 9)
    os.waitpid(process, 0)
    assert not [path for path in folder.iterdir() if path.name.startswith("eid_")]
