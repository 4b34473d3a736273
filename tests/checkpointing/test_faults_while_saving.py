"""Whatever happens while a checkpoint is saved, the next start finds a whole one: the old or the new."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from modalities import durability
from modalities.checkpointing import paths
from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.checkpoint_saving import CheckpointSaving
from modalities.checkpointing.discovery import checkpoints_in, locate_checkpoint
from modalities.checkpointing.fsdp.fsdp_checkpoint_loading import DCPCheckpointLoading
from modalities.checkpointing.fsdp.fsdp_checkpoint_saving import DCPCheckpointSaving
from modalities.checkpointing.reading.loading import verify_together
from modalities.checkpointing.retention import SaveKMostRecentCheckpointsStrategy
from modalities.checkpointing.storage import sweep
from modalities.checkpointing.uploading import Uploader, upload
from modalities.exceptions import CheckpointError
from modalities.progress import TrainingProgress
from tests.checkpointing.faulty_layers import CountingLayer, PowerLossLayer, die

FIRST_STEP = 1


@pytest.fixture(autouse=True)
def _layer() -> Iterator[None]:
    yield
    durability.layer = durability.FileLayer()


def _app_state(value: float) -> AppState:
    model = torch.nn.Linear(4, 3)
    torch.nn.init.constant_(model.weight, value)
    optimizer = torch.optim.AdamW(model.parameters())
    return AppState(model, optimizer)


def _saving(folder: Path) -> CheckpointSaving:
    """Keeps one checkpoint, so that a save has something to delete."""
    return CheckpointSaving(SaveKMostRecentCheckpointsStrategy(1), DCPCheckpointSaving(folder, "x", 0))


def _save(folder: Path, step: int, value: float) -> None:
    _saving(folder).save_now(TrainingProgress(step, 10 * step, 99, 990), _app_state(value))


def _found(folder: Path) -> tuple[int, float]:
    """Step and value of what the next start goes on from."""
    newest = checkpoints_in(folder, "x")[-1]
    verify_together(newest, "full")
    app_state = _app_state(-1.0)
    DCPCheckpointLoading(0).load_checkpoint_(app_state, newest.path)
    (value,) = app_state.model.weight.detach().unique().tolist()
    return newest.progress.num_seen_steps, value


SCENARIOS = {"the next step": FIRST_STEP + 1, "the same step anew": FIRST_STEP}


def _num_operations(folder: Path, step: int) -> int:
    _save(folder, FIRST_STEP, 1.0)
    counting = durability.layer = CountingLayer()
    _save(folder, step, 2.0)
    durability.layer = durability.FileLayer()
    return counting.num_operations


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_any_operation(tmp_path: Path, scenario: str) -> None:
    step = SCENARIOS[scenario]
    total = _num_operations(tmp_path / "counted", step)
    assert total > 20
    seen = set()
    for at in range(1, total + 2):
        folder = tmp_path / str(at)
        _save(folder, FIRST_STEP, 1.0)
        process = os.fork()
        if process == 0:
            durability.layer = CountingLayer(at, die)
            _save(folder, step, 2.0)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        assert os.waitstatus_to_exitcode(status) == (9 if at <= total else 0)
        sweep(folder, "x")
        found = _found(folder)
        assert found in {(FIRST_STEP, 1.0), (step, 2.0)}, at
        seen.add(found)
        assert locate_checkpoint(folder / paths.LAST_CHECKPOINT_INFO).path.exists()
        # the next start saves the step that was cut off, and goes on
        _save(folder, step, 3.0)
        assert _found(folder) == (step, 3.0)
        _save(folder, step + 1, 4.0)
        assert _found(folder) == (step + 1, 4.0)
        assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []
        assert len(checkpoints_in(folder)) == 1
    assert seen == {(FIRST_STEP, 1.0), (step, 2.0)}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EIO, errno.ENOENT])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_error_at_any_operation(tmp_path: Path, scenario: str, number: int) -> None:
    step = SCENARIOS[scenario]

    def fail(_: str) -> None:
        raise OSError(number, os.strerror(number), "somewhere")

    total = _num_operations(tmp_path / "counted", step)
    for at in range(1, total + 1):
        folder = tmp_path / str(at)
        _save(folder, FIRST_STEP, 1.0)
        layer = durability.layer = CountingLayer(at, fail)
        told = None
        try:
            _save(folder, step, 2.0)
        except CheckpointError as error:
            told = str(error)
        durability.layer = durability.FileLayer()
        if told is not None:
            assert os.strerror(number) in told.splitlines()[0], (at, layer.names)
        sweep(folder, "x")
        found = _found(folder)
        assert found in {(FIRST_STEP, 1.0), (step, 2.0)}, (at, layer.names[at - 1])
        assert told is not None or found == (step, 2.0), (at, layer.names[at - 1])
        _save(folder, step + 1, 4.0)
        assert _found(folder) == (step + 1, 4.0)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_power_lost_after_any_operation(tmp_path: Path, scenario: str) -> None:
    step = SCENARIOS[scenario]
    folder = tmp_path / "disk" / "checkpoints"
    _save(folder, FIRST_STEP, 1.0)
    numbers = itertools.count()
    seen = []

    def look(layer: PowerLossLayer) -> None:
        for lazy in (True, False):
            image = tmp_path / f"image-{next(numbers)}"
            layer.image(image, lazy=lazy)
            real, durability.layer = durability.layer, durability.FileLayer()
            try:
                sweep(image / "checkpoints", "x")
                seen.append(_found(image / "checkpoints"))
            finally:
                durability.layer = real

    durability.layer = PowerLossLayer(tmp_path / "disk", look)
    _save(folder, step, 2.0)
    assert len(seen) > 40
    assert set(seen) == {(FIRST_STEP, 1.0), (step, 2.0)}
    assert seen[-2:] == [(step, 2.0)] * 2
    last_old = max(index for index, found in enumerate(seen) if found == (FIRST_STEP, 1.0))
    assert (step, 2.0) not in seen[: last_old - 2], "once it is there it stays"


def test_an_upload_that_is_killed_leaves_no_half_of_a_copy(tmp_path: Path) -> None:
    _save(tmp_path / "fast", FIRST_STEP, 1.0)
    (checkpoint,) = checkpoints_in(tmp_path / "fast")
    seen = set()
    for at in itertools.count(1):
        target = tmp_path / str(at) / checkpoint.path.name
        process = os.fork()
        if process == 0:
            durability.layer = CountingLayer(at, die)
            upload(checkpoint.path, target)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        copies = checkpoints_in(target.parent) if target.parent.exists() else []
        seen.add(len(copies))
        if copies:
            assert _found(target.parent) == (FIRST_STEP, 1.0)
        upload(checkpoint.path, target)
        assert _found(target.parent) == (FIRST_STEP, 1.0)
        assert not [path.name for path in target.parent.iterdir() if path.name.startswith(".")]
        if os.waitstatus_to_exitcode(status) == 0:
            break
    assert seen == {0, 1}


def test_an_upload_that_is_stuck_does_not_hold_up_the_end_of_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _save(tmp_path / "fast", FIRST_STEP, 1.0)
    (checkpoint,) = checkpoints_in(tmp_path / "fast")
    uploader = Uploader(tmp_path / "copies", timeout_s=0.5)
    durability.layer = CountingLayer(3, lambda _: time.sleep(600))
    uploader.add(checkpoint.path)
    begun = time.monotonic()
    uploader.close()
    assert time.monotonic() - begun < 5
    assert "no end of the upload within 0.5 s" in caplog.text
    assert uploader.needs(checkpoint.path)


def test_a_damaged_checkpoint_is_not_copied(tmp_path: Path) -> None:
    _save(tmp_path / "fast", FIRST_STEP, 1.0)
    (checkpoint,) = checkpoints_in(tmp_path / "fast")
    _flip(checkpoint.path / "__0_0.distcp", 4000)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is not as it was written"):
        upload(checkpoint.path, tmp_path / "copies" / checkpoint.path.name)
    assert list((tmp_path / "copies").iterdir()) == []


def _flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    _save(tmp_path, FIRST_STEP, 1.0)
    (checkpoint,) = checkpoints_in(tmp_path)
    generator = torch.Generator().manual_seed(0)
    files = sorted(path for path in checkpoint.path.iterdir())
    assert {path.name for path in files} == {"__0_0.distcp", ".metadata", "resume_state.pt", "manifest.json"}

    def draw(bound: int) -> int:
        return int(torch.randint(bound, (1,), generator=generator))

    for _ in range(200):
        path = files[draw(len(files))]
        bit = draw(8 * path.stat().st_size)
        _flip(path, bit)
        with pytest.raises(CheckpointError, match=path.name):
            verify_together(checkpoint, "full")
        _flip(path, bit)
    verify_together(checkpoint, "full")


def _zero_page(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:8192] = bytes(len(content[4096:8192]))
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "truncated to nothing": lambda path: os.truncate(path, 0),
    "a byte appended": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "missing": Path.unlink,
    "a zeroed page": _zero_page,
    "replaced by a folder": lambda path: (path.unlink(), path.mkdir())[-1],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "resume_state.pt"])
def test_a_damaged_file_is_named_and_nothing_is_loaded(tmp_path: Path, name: str, damage: str) -> None:
    _save(tmp_path, FIRST_STEP, 1.0)
    (checkpoint,) = checkpoints_in(tmp_path)
    DAMAGES[damage](checkpoint.path / name)
    app_state = _app_state(5.0)
    with pytest.raises(CheckpointError, match=name):
        DCPCheckpointLoading(0).load_checkpoint_(app_state, checkpoint.path)
    assert app_state.model.weight.detach().unique().tolist() == [5.0]


def test_a_swapped_file_of_another_checkpoint_is_found(tmp_path: Path) -> None:
    for step, value in ((1, 1.0), (2, 2.0)):
        _save(tmp_path / str(step), step, value)
    (first,), (second,) = (checkpoints_in(tmp_path / str(step)) for step in (1, 2))
    (first.path / "__0_0.distcp").replace(second.path / "__0_0.distcp")
    with pytest.raises(
        CheckpointError, match=r"__0_0\.distcp: checksum [0-9a-f]{32} was written, [0-9a-f]{32} is found"
    ):
        verify_together(second, "full")
