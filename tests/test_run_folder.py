"""Runs are found again by the config that started them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modalities.exceptions import UserError
from modalities.run import RunRequest, run
from modalities.run_folder import RunFolder, find_checkpoint, newest_run_of
from modalities.testing.ranks import run_on_ranks
from modalities.testing.tiny import tiny_config, write_config


def _started(folder: Path, config: Path, at: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps([{"config_file": str(config.absolute()), "started_at": at}]))
    return folder


def test_the_newest_run_of_a_config(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    _started(tmp_path / "runs" / "z", config, "2026-01-01T10:00:00+0000")
    newest = _started(tmp_path / "runs" / "a", config, "2026-01-02T09:00:00+0000")
    _started(tmp_path / "runs" / "b", tmp_path / "b.yaml", "2026-01-03T09:00:00+0000")
    (tmp_path / "runs" / "no-run").mkdir()
    (tmp_path / "runs" / "a-file").touch()
    assert newest_run_of(config, tmp_path / "runs") == newest
    assert newest_run_of(tmp_path / "c.yaml", tmp_path / "runs") is None
    assert newest_run_of(config, tmp_path / "nowhere") is None


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to the run folder"):
        RunFolder(tmp_path / "file" / "run").create()


def _run(config: Path, root: Path, experiment_id: str | None, resume: str) -> str:
    return str(run(RunRequest(config, root, experiment_id, resume)).run_folder)


def test_auto_starts_afresh_then_goes_on_with_the_same_run(tmp_path: Path) -> None:
    tree = tiny_config(tmp_path, num_steps=4)
    config = write_config(tree, tmp_path / "config.yaml")
    (first,) = set(run_on_ranks(_run, 2, config, tmp_path / "runs", None, "auto"))
    tree["settings"]["training_target"] = {"num_target_steps": 6, "num_target_tokens": 6 * 64}
    write_config(tree, config)
    (second,) = set(run_on_ranks(_run, 2, config, tmp_path / "runs", None, "auto"))
    assert first == second
    lines = (Path(first) / "metrics.jsonl").read_text().splitlines()
    train = [r["num_train_steps_done"] for r in map(json.loads, lines) if r["dataloader_tag"] == "train"]
    assert train == [1, 2, 3, 4, 5, 6]
    assert len(json.loads((Path(first) / "run.json").read_text())) == 2


def test_a_finished_run_that_is_resumed_ends_at_once(tmp_path: Path) -> None:
    config = write_config(tiny_config(tmp_path, num_steps=2, checkpointing_interval=2), tmp_path / "config.yaml")
    for _ in range(2):
        run_on_ranks(_run, 1, config, tmp_path, "run", "auto")
    assert find_checkpoint(tmp_path / "run").progress.num_seen_steps == 2


def _refused(config: Path, root: Path) -> str:
    with pytest.raises(UserError) as refusal:
        run(RunRequest(config, root, "run"))
    return str(refusal.value)


def test_a_fresh_run_does_not_write_into_another(tmp_path: Path) -> None:
    config = write_config(tiny_config(tmp_path, num_steps=2, checkpointing_interval=2), tmp_path / "config.yaml")
    run_on_ranks(_run, 2, config, tmp_path, "run", "none")
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    for message in run_on_ranks(_refused, 2, config, tmp_path):
        assert "has checkpoints already, the newest of step 2" in message
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_an_experiment_id_of_the_config_s_own_is_resumed_too(tmp_path: Path) -> None:
    tree = tiny_config(tmp_path, num_steps=4, checkpointing_interval=2)
    execution = tree["checkpoint_saving"]["config"]["checkpoint_saving_execution"]
    execution["config"]["experiment_id"] = "my-own"
    config = write_config(tree, tmp_path / "config.yaml")
    (first,) = set(run_on_ranks(_run, 2, config, tmp_path / "runs", None, "auto"))
    assert find_checkpoint(Path(first)).experiment_id == "my-own"
    tree["settings"]["training_target"] = {"num_target_steps": 6, "num_target_tokens": 6 * 64}
    write_config(tree, config)
    assert run_on_ranks(_run, 2, config, tmp_path / "runs", None, "auto") == [first, first]
    assert len((Path(first) / "metrics.jsonl").read_text().splitlines()) == 6 + 3


@pytest.mark.parametrize("experiment_id", ["", "..", "a/b", "/abs", ".hidden", "a\nb", "-x"])
def test_names_that_are_no_folder_are_refused(tmp_path: Path, experiment_id: str) -> None:
    config = write_config(tiny_config(tmp_path), tmp_path / "config.yaml")
    with pytest.raises(UserError, match="cannot name a run folder"):
        run(RunRequest(config, tmp_path / "runs", experiment_id))
    assert not (tmp_path / "runs").exists()


def test_a_run_that_keeps_its_checkpoints_elsewhere_is_found(tmp_path: Path) -> None:
    tree = tiny_config(tmp_path, num_steps=2, checkpointing_interval=2)
    execution = tree["checkpoint_saving"]["config"]["checkpoint_saving_execution"]
    execution["config"]["checkpoint_path"] = str(tmp_path / "elsewhere")
    config = write_config(tree, tmp_path / "config.yaml")
    run_on_ranks(_run, 1, config, tmp_path, "run", "none")
    assert find_checkpoint(tmp_path / "run").path.parent == tmp_path / "elsewhere"
