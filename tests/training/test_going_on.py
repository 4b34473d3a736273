"""What a run goes on with: the history it is on, and the evaluation that it still owes."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from modalities.checkpointing.discovery import checkpoints_in, locate_checkpoint
from modalities.checkpointing.manifest import read_manifest
from modalities.exceptions import CheckpointError, Interrupted, UserError
from modalities.run import RunRequest, run
from modalities.testing.ranks import RankFailure, run_on_ranks
from modalities.testing.tiny import tiny_config, write_config
from modalities.training.evaluator import Evaluator
from modalities.training.trainer import Trainer


def _config(folder: Path, num_steps: int = 8, **options: Any) -> Path:
    return write_config(tiny_config(folder, num_steps=num_steps, **options), folder / "config.yaml")


def _run(config: Path, experiment_id: str, resume: str = "none") -> int:
    return run(RunRequest(config, config.parent, experiment_id, resume)).progress.num_seen_steps


def _steps(folder: Path) -> list[int]:
    return [checkpoint.progress.num_seen_steps for checkpoint in checkpoints_in(folder / "checkpoints")]


def _results(run_folder: Path) -> list[Any]:
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [(line["num_train_steps_done"], line["dataloader_tag"], line["losses"], line["metrics"]) for line in lines]


def _stopped_in_its_evaluation(config: Path, experiment_id: str, number: int) -> str:
    """Stopped by a signal in the midst of its first evaluation, on the held-out data of that number."""
    evaluate = Evaluator.evaluate
    num_calls = 0

    def interrupted(self: Evaluator, *arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, *arguments)

    Evaluator.evaluate = interrupted  # type: ignore[method-assign]
    with pytest.raises(Interrupted) as stopped:
        _run(config, experiment_id)
    return str(stopped.value)


@pytest.mark.parametrize(("number", "last_result"), [(1, "train"), (2, "heldout")])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_evaluation_that_a_stop_cut_off_is_made_up_for(
    tmp_path: Path, world_size: int, number: int, last_result: str
) -> None:
    tree = tiny_config(tmp_path, checkpointing_interval=4)
    second = copy.deepcopy(tree["eval_dataloaders"][0])
    second["config"]["dataloader_tag"] = "second"
    tree["eval_dataloaders"].append(second)
    config = write_config(tree, tmp_path / "config.yaml")
    run_on_ranks(_run, 2, config, "unbroken")
    for told in run_on_ranks(_stopped_in_its_evaluation, 2, config, "stopped", number):
        assert told == "preempted by SIGTERM after step 4"
    assert [(step, tag) for step, tag, _, _ in _results(tmp_path / "stopped")][-1] == (4, last_result)
    run_on_ranks(_run, world_size, config, "stopped", "auto")
    unbroken, stopped = (_results(tmp_path / name) for name in ("unbroken", "stopped"))
    assert [(step, tag) for step, tag, _, _ in stopped] == [(step, tag) for step, tag, _, _ in unbroken]
    if world_size == 2:
        assert stopped == unbroken


def test_a_checkpoint_tells_only_what_was_measured_at_its_step(tmp_path: Path) -> None:
    tree = tiny_config(tmp_path, num_steps=8, checkpointing_interval=2)
    tree["settings"]["intervals"]["evaluation_interval_in_steps"] = 4
    _run(write_config(tree, tmp_path / "config.yaml"), "x")
    assert [list(_metrics_at(tmp_path / "x", step)) for step in (2, 4, 6, 8)] == [[], ["heldout loss"]] * 2


def _cut_off_at_the_end(config: Path, number: int) -> str:
    return _stopped_in_its_evaluation(config, "x", number)


def test_a_run_whose_last_evaluation_was_cut_off_is_not_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(tmp_path, checkpointing_interval=8)
    assert run_on_ranks(_cut_off_at_the_end, 1, config, 1) == ["preempted by SIGTERM after step 8"]
    assert _results(tmp_path / "x")[-1][:2] == (8, "train")
    summary = run(RunRequest(config, tmp_path, "x", "auto"))
    assert summary.is_finished
    assert _results(tmp_path / "x")[-1][:2] == (8, "heldout")
    assert "heldout loss" in capsys.readouterr().out


def test_the_runs_own_checkpoints_are_loaded_whole_though_it_began_from_a_part(tmp_path: Path) -> None:
    _run(_config(tmp_path, checkpointing_interval=4), "source")
    origin = checkpoints_in(tmp_path / "source" / "checkpoints")[0].path
    tree = tiny_config(tmp_path, checkpointing_interval=2)
    tree["checkpoint_loading"] = {"variant_key": "dcp", "exclude": ["optimizer.*"]}
    config = write_config(tree, tmp_path / "part.yaml")
    _run(config, "x", str(origin))
    expected = _results(tmp_path / "x")
    shutil.rmtree(checkpoints_in(tmp_path / "x" / "checkpoints")[-1].path)
    _run(config, "x", "auto")
    assert _results(tmp_path / "x") == expected


def _metrics_at(run_folder: Path, step: int) -> dict[str, float]:
    (found,) = (c for c in checkpoints_in(run_folder / "checkpoints") if c.progress.num_seen_steps == step)
    manifest = read_manifest(found.manifest_path)
    assert manifest is not None
    return dict(manifest.metrics)


def test_checkpoints_are_not_kept_by_what_nobody_measures(tmp_path: Path) -> None:
    tree = tiny_config(tmp_path)
    strategy = tree["checkpoint_saving"]["config"]["checkpoint_saving_strategy"]
    strategy["variant_key"], strategy["config"] = "keep_best_k_strategy", {"k": 3, "metric": "heldout_loss"}
    config = write_config(tree, tmp_path / "config.yaml")
    with pytest.raises(UserError, match="kept by `heldout_loss`, but evaluations measure heldout loss"):
        _run(config, "x")


def test_a_run_that_was_sent_back_stays_on_its_new_history(tmp_path: Path) -> None:
    config = _config(tmp_path, checkpointing_interval=2)
    _run(config, "x")
    assert _steps(tmp_path / "x") == [2, 4, 6, 8]
    back = checkpoints_in(tmp_path / "x" / "checkpoints")[0].path
    # sent back to step 2, and cut off behind step 4
    tree = tiny_config(tmp_path, num_steps=4, checkpointing_interval=2, seed=1)
    short = write_config(tree, tmp_path / "short.yaml")
    longer_or_shorter = ("lr_scheduler.total_steps",)
    request = RunRequest(short, tmp_path, "x", str(back), allow_changed=longer_or_shorter)
    assert run(request).progress.num_seen_steps == 4
    newest = locate_checkpoint(tmp_path / "x")
    assert newest.progress.num_seen_steps == 4
    longer = write_config(tiny_config(tmp_path, num_steps=6, checkpointing_interval=2), tmp_path / "longer.yaml")
    run(RunRequest(longer, tmp_path, "x", "auto", allow_changed=longer_or_shorter))
    assert locate_checkpoint(tmp_path / "x").progress.num_seen_steps == 6
    started = json.loads((tmp_path / "x" / "run.json").read_text())
    assert len(started) == 3


def _killed_at_its_first_save(config: Path, experiment_id: str, resume: str) -> None:
    Trainer._save = lambda *_: os._exit(9)  # type: ignore[method-assign]
    _run(config, experiment_id, resume)


def test_a_run_that_was_sent_back_and_killed_before_it_saved_is_sent_back_all_the_same(tmp_path: Path) -> None:
    config = _config(tmp_path, checkpointing_interval=2)
    _run(config, "x")
    expected = _results(tmp_path / "x")
    back = checkpoints_in(tmp_path / "x" / "checkpoints")[0].path
    with pytest.raises(RankFailure, match="exit code 9"):
        run_on_ranks(_killed_at_its_first_save, 1, config, "x", str(back))
    # step 8 is still there, but would be another history than that of the figures
    _run(config, "x", "auto")
    started = json.loads((tmp_path / "x" / "run.json").read_text())
    assert [start["start"]["step"] for start in started] == [0, 2, 2]
    assert _results(tmp_path / "x") == expected


def test_what_was_whole_once_is_told_when_a_part_of_it_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(tmp_path, checkpointing_interval=2)
    _run(config, "x")
    checkpoints = checkpoints_in(tmp_path / "x" / "checkpoints")
    (checkpoints[-1].path / ".metadata").unlink()
    _run(config, "x", "auto")
    assert "seen_steps_8-" in caplog.text
    assert ".metadata: is missing; going back to the one before it" in caplog.text
    for checkpoint in checkpoints:
        (checkpoint.path / ".metadata").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=r"\.metadata: is missing"):
        _run(config, "x", "auto")


@pytest.mark.parametrize("damage", ["resume state", "index", "length"])
def test_damage_that_no_manifest_tells_is_found_before_the_state_is_touched(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(tmp_path, checkpointing_interval=4)
    _run(config, "x")
    for checkpoint in checkpoints_in(tmp_path / "x" / "checkpoints"):
        checkpoint.manifest_path.unlink()
    newest = checkpoints_in(tmp_path / "x" / "checkpoints")[-1].path
    if damage == "resume state":
        (newest / "resume_state.pt").write_bytes(bytes(500))
    elif damage == "index":
        content = bytearray((newest / ".metadata").read_bytes())
        place = content.index(b"transformer.wte.weight")
        content[place : place + 3] = b"abc"
        (newest / ".metadata").write_bytes(bytes(content[: len(content) // 2]))
    else:
        os.truncate(newest / "__0_0.distcp", (newest / "__0_0.distcp").stat().st_size - 5000)
    _run(config, "x", "auto")
    assert "going back to the one before it" in caplog.text


def test_a_flipped_bit_in_the_index_is_damage_and_not_another_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(tmp_path, checkpointing_interval=4)
    _run(config, "x")
    index = checkpoints_in(tmp_path / "x" / "checkpoints")[-1].path / ".metadata"
    content = bytearray(index.read_bytes())
    content[content.index(b"transformer.wte.weight") + 2] ^= 1
    index.write_bytes(bytes(content))
    _run(config, "x", "auto")
    assert ".metadata: checksum" in caplog.text
    assert "going back to the one before it" in caplog.text


def test_a_full_file_that_cannot_be_read_is_gone_back_behind(tmp_path: Path) -> None:
    config = _config(tmp_path, checkpointing_interval=4, wrapper="fsdp1")
    run_on_ranks(_run, 2, config, "x")
    for checkpoint in checkpoints_in(tmp_path / "x" / "checkpoints"):
        checkpoint.manifest_path.unlink()
    checkpoints_in(tmp_path / "x" / "checkpoints")[-1].path.write_bytes(b"torn")
    run_on_ranks(_run, 2, config, "x", "auto")
    started = json.loads((tmp_path / "x" / "run.json").read_text())
    assert [start["start"]["step"] for start in started] == [0, 4]
