"""Saving under the circumstances in which users of this kind of software have lost checkpoints."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from modalities import durability
from modalities.checkpointing import rehearsal
from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.checkpoint_saving import CheckpointSaving, make_dcp_execution
from modalities.checkpointing.discovery import checkpoints_in, locate_checkpoint
from modalities.checkpointing.fsdp.fsdp_checkpoint_loading import DCPCheckpointLoading
from modalities.checkpointing.manifest import read_manifest
from modalities.checkpointing.resume_state import read_resume_state
from modalities.checkpointing.retention import SaveKMostRecentCheckpointsStrategy
from modalities.checkpointing.saving.saver import Mode
from modalities.exceptions import CheckpointError
from modalities.progress import TrainingProgress
from modalities.testing.ranks import RankFailure, run_on_ranks
from tests.checkpointing.faulty_layers import CountingLayer


def _app_state(value: float, width: int = 8) -> AppState:
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 3))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    if dist.get_world_size() > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return AppState(model, torch.optim.SGD(model.parameters()))


def _progress(step: int) -> TrainingProgress:
    return TrainingProgress(step, 10 * step, 9999, 99990)


def _saving(folder: Path, mode: Mode = "sync", k: int = -1, experiment_id: str = "x") -> CheckpointSaving:
    execution = make_dcp_execution(folder, experiment_id, dist.get_rank(), mode, 30)
    return CheckpointSaving(SaveKMostRecentCheckpointsStrategy(k), execution)


def _fill(app_state: AppState, value: float) -> None:
    with torch.no_grad():
        for parameter in app_state.model.parameters():
            parameter.fill_(value)


def _values(app_state: AppState) -> list[float]:
    tensors = [p.to_local() if isinstance(p, DTensor) else p for p in app_state.model.parameters()]
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).unique().tolist()


def _loaded(checkpoint: Path) -> list[float]:
    app_state = _app_state(-1)
    DCPCheckpointLoading(dist.get_rank()).load_checkpoint_(app_state, checkpoint)
    return _values(app_state)


def _steps(folder: Path, experiment_id: str = "x") -> list[int]:
    return [checkpoint.progress.num_seen_steps for checkpoint in checkpoints_in(folder, experiment_id)]


class SlowLayer(durability.FileLayer):
    """Takes its time for every write."""

    def write(self, file: Any, data: Any) -> None:
        time.sleep(0.3)
        super().write(file, data)


def _save_over_debris(folder: Path) -> None:
    saving = _saving(folder)
    for step in (1, 2):
        saving.save_now(_progress(step), _app_state(step))
    half = checkpoints_in(folder)[-1].path
    dist.barrier()
    if dist.get_rank() == 0:
        for name in ("manifest.json", ".metadata", "__1_0.distcp"):
            (half / name).unlink()
        shutil.copytree(half, half.with_name(f".tmp-{half.name}"))
    dist.barrier()
    assert _steps(folder) == [1]
    again = _saving(folder)
    again.rehearse(_app_state(0))
    for step in (2, 3):
        again.save_now(_progress(step), _app_state(10 * step))
    again.close()
    assert _loaded(checkpoints_in(folder)[1].path) == [20]


def test_half_a_checkpoint_of_a_step_is_in_nobodys_way(tmp_path: Path) -> None:
    run_on_ranks(_save_over_debris, 2, tmp_path)
    assert _steps(tmp_path) == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


class NoRename(durability.FileLayer):
    """Refuses to give a checkpoint's folder its name."""

    def rename(self, source: Path, target: Path) -> None:
        if source.is_dir():
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(target))
        super().rename(source, target)


def _fail_to_publish(folder: Path, mode: Mode) -> str:
    saving = _saving(folder, mode)
    if dist.get_rank() == 0:
        durability.layer = NoRename()

    def save() -> None:
        saving.save_now(_progress(1), _app_state(1))
        saving.settle()

    with pytest.raises(CheckpointError) as failure:
        save()
    return str(failure.value)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_checkpoint_that_does_not_get_its_name_is_an_error_on_all_ranks(tmp_path: Path, mode: Mode) -> None:
    for message in run_on_ranks(_fail_to_publish, 2, tmp_path, mode):
        assert "rank 0: Permission denied" in message
    assert list(tmp_path.iterdir()) == []


def _die_while_writing(folder: Path) -> None:
    saving = _saving(folder, "async", k=1)
    saving.save_now(_progress(1), _app_state(1))
    saving.settle()
    durability.layer = SlowLayer()
    saving.save_now(_progress(2), _app_state(2))
    dist.barrier()
    os._exit(9)


def _load_by_the_pointer(folder: Path) -> None:
    assert _loaded(locate_checkpoint(folder / "last_checkpoint_info.json").path) == [1]


def test_the_older_checkpoint_and_the_pointer_wait_for_the_newer_one(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="exit code 9"):
        run_on_ranks(_die_while_writing, 2, tmp_path)
    assert _steps(tmp_path) == [1]
    run_on_ranks(_load_by_the_pointer, 2, tmp_path)


def _load_at_once(folder: Path) -> None:
    durability.layer = SlowLayer()
    path = _saving(folder, "async").save_now(_progress(1), _app_state(1))
    assert path is not None
    assert not path.exists()
    assert _loaded(path) == [1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_loading_waits_for_the_save_in_flight(tmp_path: Path, world_size: int) -> None:
    run_on_ranks(_load_at_once, world_size, tmp_path)


def _go_on_while_saving(folder: Path) -> None:
    saving, app_state, metrics = _saving(folder, "async"), _app_state(1), {"loss": 10.0}
    app_state.rank_state["norm"] = 10.0
    durability.layer = SlowLayer()
    progress = TrainingProgress(10, 100, 9999, 99990, 40)
    path = saving.save_now(progress, app_state, metrics)
    assert path is not None
    for _ in range(3):
        progress = progress.after_step(4, 10)
        metrics["loss"] = app_state.rank_state["norm"] = 13.0
        torch.rand(1)
    assert not path.exists()
    saving.settle()
    (checkpoint,) = checkpoints_in(folder)
    manifest, resume_state = read_manifest(checkpoint.manifest_path), read_resume_state(checkpoint.resume_state_path)
    assert manifest is not None
    assert resume_state is not None
    assert checkpoint.progress.num_seen_steps == 10
    assert manifest.progress == resume_state.progress == TrainingProgress(10, 100, 9999, 99990, 40)
    assert manifest.metrics == {"loss": 10.0}
    assert resume_state.rank_state == [{"norm": 10.0}] * dist.get_world_size()
    assert not torch.equal(resume_state.rng[dist.get_rank()]["torch"], torch.get_rng_state())


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_recorded_is_of_the_call_not_of_the_commit(tmp_path: Path, world_size: int) -> None:
    run_on_ranks(_go_on_while_saving, world_size, tmp_path)


def _memory_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def _growth_of_big_saves(folder: Path) -> float:
    saving, app_state = _saving(folder, "async", k=1), _app_state(1, width=2250)
    sizes = []
    for step in range(1, 31):
        saving.save_now(_progress(step), app_state)
        saving.settle()
        sizes.append(_memory_mb("VmRSS"))
    return sizes[-1] - sizes[4]


def test_saves_of_20_mb_leave_no_memory_behind(tmp_path: Path) -> None:
    (growth_mb,) = run_on_ranks(_growth_of_big_saves, 1, tmp_path)
    assert growth_mb < 20


def _save_steps(folder: Path, steps: list[int], k: int, between: Callable[[Path], None] = lambda _: None) -> None:
    saving = _saving(folder, k=k)
    for step in steps:
        saving.save_now(_progress(step), _app_state(step))
        dist.barrier()
        if dist.get_rank() == 0:
            between(folder)
        dist.barrier()


def _touch_the_oldest(folder: Path) -> None:
    os.utime(checkpoints_in(folder)[0].path, (2**31, 2**31))


@pytest.mark.parametrize("between", [lambda _: None, _touch_the_oldest])
def test_the_newest_are_those_of_most_steps_whatever_names_and_times_say(
    tmp_path: Path, between: Callable[[Path], None]
) -> None:
    run_on_ranks(_save_steps, 2, tmp_path, [9, 10, 100], 2, between)
    assert _steps(tmp_path) == [10, 100]


def test_the_first_save_of_several_ranks_makes_the_folder(tmp_path: Path) -> None:
    run_on_ranks(_save_steps, 2, tmp_path / "not" / "yet" / "there", [1, 2, 3], 2)
    assert _steps(tmp_path / "not" / "yet" / "there") == [2, 3]


def _save_below_a_higher_step(folder: Path) -> None:
    for experiment_id in ("x", "another"):
        _saving(folder, experiment_id=experiment_id).save_now(_progress(1000), _app_state(1))
    _save_steps(folder, [8, 9, 10], 1)


def test_checkpoints_of_more_steps_are_neither_deleted_nor_in_the_way(tmp_path: Path) -> None:
    run_on_ranks(_save_below_a_higher_step, 2, tmp_path)
    assert _steps(tmp_path) == [10, 1000]
    assert _steps(tmp_path, "another") == [1000]


def _remove_all(folder: Path) -> None:
    for checkpoint in checkpoints_in(folder):
        shutil.rmtree(checkpoint.path)


@pytest.mark.parametrize("between", [lambda _: None, _remove_all])
def test_deleting_what_is_full_or_gone_does_not_end_the_run(tmp_path: Path, between: Callable[[Path], None]) -> None:
    run_on_ranks(_save_steps, 2, tmp_path, [1, 2, 3], 1, between)
    assert _steps(tmp_path) == ([3] if between is not _remove_all else [])


def _clash_of_folders(folder: Path) -> None:
    saving, make = _saving(folder), Path.mkdir
    num_clashes = 0

    def clash(path: Path, *arguments: Any, **options: Any) -> None:
        nonlocal num_clashes
        make(path, *arguments, **options)
        num_clashes += 1
        if num_clashes == 1:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))

    if dist.get_rank() == 1:
        Path.mkdir = clash  # type: ignore[method-assign]
    saving.save_now(_progress(1), _app_state(1))
    assert num_clashes == dist.get_rank()
    assert _loaded(checkpoints_in(folder)[0].path) == [1]


def test_a_race_for_a_folder_is_lost_without_harm(tmp_path: Path) -> None:
    run_on_ranks(_clash_of_folders, 2, tmp_path / "checkpoints")


def _hidden_for(folder: Path, seconds: float) -> Callable[[Path], bool]:
    """What ``Path.is_dir`` says where a folder of another machine shows itself late."""
    is_dir, begun = Path.is_dir, time.monotonic()

    def seen(path: Path, **options: Any) -> bool:
        return is_dir(path, **options) and (path != folder or time.monotonic() - begun > seconds)

    return seen


class LateFolder(durability.FileLayer):
    def make_folder(self, path: Path) -> None:
        time.sleep(1)
        super().make_folder(path)


def _rehearse_late(folder: Path) -> None:
    if dist.get_rank() == 0:
        durability.layer = LateFolder()
    else:
        Path.is_dir = _hidden_for(folder, 3)  # type: ignore[method-assign, assignment]
    saving = _saving(folder)
    saving.rehearse(_app_state(1))
    saving.save_now(_progress(1), _app_state(1))
    saving.close()
    assert _loaded(checkpoints_in(folder)[0].path) == [1]


def test_a_folder_that_shows_itself_late_is_waited_for(tmp_path: Path) -> None:
    run_on_ranks(_rehearse_late, 2, tmp_path / "checkpoints")


def _rehearse_in_vain(folder: Path) -> str:
    rehearsal._VISIBLE_WITHIN_S = 1
    if dist.get_rank() == 1:
        Path.is_dir = _hidden_for(folder, 60)  # type: ignore[method-assign, assignment]
    with pytest.raises(CheckpointError) as refusal:
        _saving(folder).rehearse(_app_state(1))
    return str(refusal.value)


def test_a_folder_that_one_rank_never_sees_is_told_before_the_first_step(tmp_path: Path) -> None:
    for message in run_on_ranks(_rehearse_in_vain, 2, tmp_path / "checkpoints"):
        assert "rank 1 cannot write to" in message
        assert "file system that all machines share" in message


class OneRankFullDisk(CountingLayer):
    def __init__(self) -> None:
        super().__init__(3, self._fail)

    def _fail(self, _: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fail_to_overwrite(folder: Path, mode: Mode) -> None:
    saving, app_state = _saving(folder, mode), _app_state(1)
    saving.save_now(_progress(1), app_state)
    saving.settle()
    if dist.get_rank() == 1:
        durability.layer = OneRankFullDisk()
    _fill(app_state, 2)

    def save() -> None:
        saving.save_now(_progress(1), app_state)
        saving.settle()

    with pytest.raises(CheckpointError, match="rank 1: No space left on device"):
        save()
    assert _loaded(checkpoints_in(folder)[0].path) == [1]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_failed_overwrite_leaves_the_old_checkpoint_unmixed(tmp_path: Path, mode: Mode) -> None:
    run_on_ranks(_fail_to_overwrite, 2, tmp_path, mode)


def _go_on_from_the_newest(folder: Path, step: int) -> None:
    if step > 1:
        newest = locate_checkpoint(folder / "last_checkpoint_info.json").path
        assert newest == locate_checkpoint(folder).path
        assert _loaded(newest) == [step - 1]
    _save_steps(folder, [step], -1)


def test_every_world_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    for step, world_size in enumerate((2, 1, 2, 1), start=1):
        run_on_ranks(_go_on_from_the_newest, world_size, tmp_path, step)
    assert _steps(tmp_path) == [1, 2, 3, 4]


def _stepped(value: float, width: int) -> AppState:
    """With momentum, of the size of the weights."""
    app_state = _app_state(value, width)
    app_state.optimizer = torch.optim.SGD(app_state.model.parameters(), lr=1.0, momentum=0.9)
    for parameter in app_state.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    app_state.optimizer.step()
    app_state.optimizer.zero_grad()
    return app_state


def _extra_memory_mb(folder: Path) -> list[float]:
    """By how much saving in place, saving from a copy, and loading raise this process's memory at most."""
    saving, beside = _saving(folder), _saving(folder, "async")
    app_state, target = _stepped(1, width=5000), _stepped(0, width=5000)
    warm_up = _saving(folder / "small")
    warm_up.save_now(_progress(1), _app_state(1))
    _loaded(checkpoints_in(folder / "small")[0].path)

    def save_beside() -> None:
        beside.save_now(_progress(2), app_state)
        beside.settle()

    extra = [_peak_mb(lambda: saving.save_now(_progress(1), app_state)), _peak_mb(save_beside)]
    newest = checkpoints_in(folder)[-1].path
    extra.append(_peak_mb(lambda: DCPCheckpointLoading(dist.get_rank()).load_checkpoint_(target, newest)))
    assert _values(target) == [1]
    return extra


def _peak_mb(work: Callable[[], Any]) -> float:
    dist.barrier()
    before = _memory_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    dist.barrier()
    return _memory_mb("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_no_rank_holds_more_than_its_shard(tmp_path: Path) -> None:
    shard_mb = 2 * 5000 * 5000 * 4 / 2**20 / 2
    for in_place, from_a_copy, loading in run_on_ranks(_extra_memory_mb, 2, tmp_path):
        assert in_place < 40
        assert from_a_copy < shard_mb + 40
        assert loading < 40
