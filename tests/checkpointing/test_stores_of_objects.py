"""Checkpoints in stores that cannot rename: fsspec's memory, and a server that speaks S3."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from modalities.checkpointing import storage
from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.checkpoint_saving import CheckpointSaving, make_dcp_execution
from modalities.checkpointing.discovery import checkpoints_in, locate_checkpoint
from modalities.checkpointing.fsdp.fsdp_checkpoint_loading import DCPCheckpointLoading
from modalities.checkpointing.reading.loading import verify_together
from modalities.checkpointing.retention import SaveKMostRecentCheckpointsStrategy
from modalities.checkpointing.storage import ObjectPrefix, as_location, sweep
from modalities.exceptions import CheckpointError
from modalities.progress import TrainingProgress
from modalities.testing.tiny import tiny_config, write_config

BUCKET = "runs"


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """A server on this machine that speaks S3; gives the environment that leads to it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    old = dict(os.environ)
    os.environ.update(environment)
    try:
        import s3fs

        s3fs.S3FileSystem().mkdir(BUCKET)
        yield environment
    finally:
        os.environ.clear()
        os.environ.update(old)
        server.stop()


@pytest.fixture(params=["memory", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return f"s3://{BUCKET}/{tmp_path.name}/checkpoints"
    return f"memory://{tmp_path.name}/checkpoints"


def _app_state(value: float) -> AppState:
    model = torch.nn.Linear(300, 100)
    torch.nn.init.constant_(model.weight, value)
    return AppState(model, torch.optim.AdamW(model.parameters()))


def _save(folder: str, *steps: int) -> None:
    saving = CheckpointSaving(
        SaveKMostRecentCheckpointsStrategy(2),
        make_dcp_execution(folder, "x", 0, "async", 30),  # type: ignore[arg-type]
    )
    saving.rehearse(_app_state(0))
    for step in steps:
        saving.save_now(TrainingProgress(step, step, 9, 9), _app_state(step))
    saving.settle()


def _loaded(checkpoint: Any) -> list[float]:
    app_state = _app_state(-1)
    DCPCheckpointLoading(0).load_checkpoint_(app_state, checkpoint)
    return app_state.model.weight.detach().unique().tolist()


def _steps(folder: str) -> list[int]:
    return [checkpoint.progress.num_seen_steps for checkpoint in checkpoints_in(as_location(folder), "x")]


def test_saved_kept_found_and_loaded(folder: str) -> None:
    _save(folder, 1, 2, 3, 4)
    assert _steps(folder) == [3, 4]
    newest = locate_checkpoint(as_location(folder) / "last_checkpoint_info.json")
    assert newest.progress.num_seen_steps == 4
    assert _loaded(newest.path) == [4]
    assert _loaded(str(newest.path)) == [4]


def test_a_save_that_breaks_off_is_no_checkpoint(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(folder, 1)
    write = storage.ObjectPrefix.write
    num_writes = 0
    fails_at = 0

    def failing(self: Any, file: Any, data: Any) -> None:
        nonlocal num_writes
        num_writes += 1
        if num_writes == fails_at:
            raise OSError(5, "the connection is gone")
        write(self, file, data)

    monkeypatch.setattr(storage.ObjectPrefix, "write", failing)
    _save(f"{folder}/counted", 2)
    total = num_writes
    assert total > 3
    for fails_at in range(1, total + 1):
        num_writes = 0
        with pytest.raises(CheckpointError, match="the connection is gone"):
            _save(folder, 2)
        assert _steps(folder) == [1]
    _save(folder, 2)
    assert _steps(folder) == [1, 2]


def test_what_fails_behind_the_commit_takes_nothing_with_it(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(folder, 1)

    def fail(*_: Any) -> None:
        raise OSError(5, "the connection is gone")

    monkeypatch.setattr("modalities.checkpointing.fsdp.fsdp_checkpoint_saving.point_at", fail)
    with pytest.raises(CheckpointError, match="the connection is gone"):
        _save(folder, 2)
    assert _steps(folder) == [1, 2]
    assert _loaded(checkpoints_in(as_location(folder))[-1].path) == [2]


def test_what_a_killed_save_left_does_not_count_and_is_replaced(folder: str) -> None:
    _save(folder, 1)
    (first,) = checkpoints_in(as_location(folder))
    half = as_location(folder) / first.path.name.replace("seen_steps_1-seen_tokens_1", "seen_steps_2-seen_tokens_2")
    for name in ("__0_0.distcp", ".metadata"):
        (half / name).write_bytes((first.path / name).read_bytes())
    assert _steps(folder) == [1]
    _save(folder, 2)
    assert _steps(folder) == [1, 2]
    assert _loaded(half) == [2]


def test_what_a_killed_save_left_is_swept_at_the_next_start(folder: str) -> None:
    _save(folder, 1)
    (first,) = checkpoints_in(as_location(folder))
    half, foreign = (
        as_location(folder) / first.path.name.replace("seen_steps_1-seen_tokens_1", f"seen_steps_{n}-seen_tokens_{n}")
        for n in (2, 3)
    )
    destination = ObjectPrefix(half)
    destination.begin()
    for path in (half / "__0_0.distcp", half / ".metadata", foreign / ".metadata"):
        path.write_bytes(b"data")
    told = sweep(as_location(folder), "x")
    assert told == [f"removed {half.name}, left behind by a run that was killed"]
    assert {path.name for path in as_location(folder).iterdir()} >= {first.path.name, foreign.name}
    assert not half.exists()
    assert _steps(folder) == [1]


def test_a_flipped_bit_is_found(folder: str) -> None:
    _save(folder, 1)
    (checkpoint,) = checkpoints_in(as_location(folder))
    data = checkpoint.path / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[50_000] ^= 4
    data.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: checksum"):
        verify_together(checkpoint, "full")


def test_checkpoints_are_also_copied_beside_training(tmp_path: Path, folder: str) -> None:
    execution = make_dcp_execution(tmp_path / "fast", "x", 0, "async", 30, folder)
    saving = CheckpointSaving(SaveKMostRecentCheckpointsStrategy(1), execution)
    saving.rehearse(_app_state(0))
    for step in (1, 2, 3):
        saving.save_now(TrainingProgress(step, step, 9, 9), _app_state(step))
    saving.settle()
    saving.close()
    assert _steps(folder)[-1] == 3
    assert _loaded(checkpoints_in(as_location(folder))[-1].path) == [3]
    assert locate_checkpoint(as_location(folder) / "last_checkpoint_info.json").progress.num_seen_steps == 3
    assert [c.progress.num_seen_steps for c in checkpoints_in(tmp_path / "fast")][-1] == 3


def test_an_upload_that_fails_does_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "occupied").touch()
    execution = make_dcp_execution(tmp_path / "fast", "x", 0, "sync", 30, str(tmp_path / "occupied" / "copies"))
    saving = CheckpointSaving(SaveKMostRecentCheckpointsStrategy(1), execution)
    saving.save_now(TrainingProgress(1, 1, 9, 9), _app_state(1))
    saving.close()
    assert "3 tries failed" in caplog.text
    assert len(checkpoints_in(tmp_path / "fast")) == 1


def test_two_ranks_train_into_a_bucket_and_go_on_from_it(tmp_path: Path, s3: dict[str, str]) -> None:
    tree = tiny_config(tmp_path, num_steps=4, checkpointing_interval=2)
    config = write_config(tree, tmp_path / "config.yaml")
    place = f"s3://{BUCKET}/ranks/checkpoints"
    words = [sys.executable, "-m", "modalities", "run", "--config", str(config), "--nproc", "2"]
    words += [
        "--experiments_root_path",
        str(tmp_path),
        f"checkpoint_saving.checkpoint_saving_execution.checkpoint_path={place}",
    ]
    words += ["checkpoint_saving.checkpoint_saving_strategy.k=2"]
    first = subprocess.run([*words, "--experiment_id", "first"], capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    found = checkpoints_in(as_location(place))
    assert [checkpoint.progress.num_seen_steps for checkpoint in found] == [2, 4]
    again = subprocess.run(
        [*words, "--experiment_id", "second", "--resume", str(found[0].path)], capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    losses = [(tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1] for name in ("first", "second")]
    assert losses[0].split('"losses"')[1].split("}")[0] == losses[1].split('"losses"')[1].split("}")[0]


def test_a_bucket_that_is_not_there_is_told_before_the_first_step(s3: dict[str, str]) -> None:
    with pytest.raises(CheckpointError, match="cannot write the checkpoint folder s3://no-such-bucket-here"):
        make_dcp_execution("s3://no-such-bucket-here/x", "x", 0, "sync", 30).rehearse(_app_state(0), 1)  # type: ignore[arg-type]
