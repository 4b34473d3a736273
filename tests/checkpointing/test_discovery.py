"""Finding checkpoints by what a user points at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modalities.checkpointing.discovery import checkpoints_in, locate_checkpoint
from modalities.checkpointing.paths import checkpoint_name, parse_checkpoint_name
from modalities.exceptions import CheckpointError
from modalities.progress import TrainingProgress


def _progress(step: int) -> TrainingProgress:
    return TrainingProgress(step, step * 64, 100, 6400)


def _dcp(folder: Path, step: int, experiment_id: str = "run-1") -> Path:
    checkpoint = folder / checkpoint_name(experiment_id, _progress(step))
    checkpoint.mkdir(parents=True)
    (checkpoint / ".metadata").touch()
    return checkpoint


def test_names_are_read_back() -> None:
    for experiment_id in ("a", "a-model", "a-manifest", "2026-01-31__12-00-00_x", "eid_seen_steps_3"):
        for entity in (None, "model", "optimizer", "resume_state", "manifest"):
            name = checkpoint_name(experiment_id, _progress(12), entity)
            assert parse_checkpoint_name(Path(name)) == (experiment_id, entity, _progress(12))
    assert parse_checkpoint_name(Path(".tmp-" + checkpoint_name("a", _progress(1)))) is None


def test_newest_is_the_one_of_most_steps_whatever_the_order_of_names(tmp_path: Path) -> None:
    folders = {step: _dcp(tmp_path, step) for step in (9, 100, 10)}
    assert [c.path for c in checkpoints_in(tmp_path)] == [folders[9], folders[10], folders[100]]
    assert locate_checkpoint(tmp_path).path == folders[100]


def test_unfinished_and_foreign_ones_do_not_count(tmp_path: Path) -> None:
    whole = _dcp(tmp_path, 1)
    (tmp_path / checkpoint_name("run-1", _progress(2))).mkdir()
    (tmp_path / f".tmp-{checkpoint_name('run-1', _progress(3))}").mkdir()
    (tmp_path / checkpoint_name("run-1", _progress(4), "model")).touch()
    _dcp(tmp_path, 5, "run-2")
    assert [c.path for c in checkpoints_in(tmp_path, "run-1")] == [whole]


def test_a_run_folder_a_pointer_and_a_checkpoint_are_understood(tmp_path: Path) -> None:
    checkpoint = _dcp(tmp_path / "checkpoints", 3)
    info = tmp_path / "checkpoints" / "last_checkpoint_info.json"
    info.write_text(json.dumps({"checkpoint_folder_path": str(checkpoint)}))
    for pointed_at in (tmp_path, tmp_path / "checkpoints", info, checkpoint):
        assert locate_checkpoint(pointed_at).path == checkpoint


def test_an_fsdp1_pair_is_one_checkpoint(tmp_path: Path) -> None:
    for entity in ("model", "optimizer"):
        (tmp_path / checkpoint_name("a", _progress(7), entity)).touch()
    (found,) = checkpoints_in(tmp_path)
    assert not found.is_distributed
    assert found.progress == _progress(7)
    assert found.optimizer_path.is_file()


@pytest.mark.parametrize("name", ["absent", "empty", "file.txt"])
def test_what_is_none_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").touch()
    with pytest.raises(CheckpointError, match=name):
        locate_checkpoint(tmp_path / name)


@pytest.mark.parametrize("content", ["[" * 100_000, "{", "3", '{"checkpoint_folder_path": "SELF"}'])
def test_a_pointer_that_names_no_checkpoint_is_told(tmp_path: Path, content: str) -> None:
    pointer = tmp_path / "last_checkpoint_info.json"
    pointer.write_text(content.replace("SELF", str(pointer)))
    with pytest.raises(CheckpointError, match=r"last_checkpoint_info\.json names"):
        locate_checkpoint(pointer)


def test_a_pointer_that_is_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "last_checkpoint_info.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        locate_checkpoint(tmp_path / "last_checkpoint_info.json")
