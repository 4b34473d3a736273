"""Saving on several ranks: beside training, with ranks that fail, freeze or die, and twice in a row."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from modalities import durability
from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.checkpoint_saving import CheckpointSaving, make_dcp_execution
from modalities.checkpointing.discovery import checkpoints_in
from modalities.checkpointing.fsdp.fsdp_checkpoint_loading import DCPCheckpointLoading
from modalities.checkpointing.fsdp.fsdp_checkpoint_saving import DCPCheckpointSaving
from modalities.checkpointing.manifest import read_manifest
from modalities.checkpointing.retention import SaveKMostRecentCheckpointsStrategy
from modalities.checkpointing.saving import agreement
from modalities.checkpointing.saving.saver import Mode
from modalities.checkpointing.verification import check_content
from modalities.exceptions import CheckpointError
from modalities.progress import TrainingProgress
from modalities.testing.ranks import RankFailure, run_on_ranks
from tests.checkpointing.faulty_layers import CountingLayer

WIDTH = 64


def _app_state(value: float) -> AppState:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 3))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    if dist.get_world_size() > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return AppState(model, torch.optim.AdamW(model.parameters()))


def _progress(step: int) -> TrainingProgress:
    return TrainingProgress(step, 10 * step, 99, 990)


def _fill(app_state: AppState, value: float) -> None:
    with torch.no_grad():
        for parameter in app_state.model.parameters():
            parameter.fill_(value)


def _values(app_state: AppState) -> list[float]:
    tensors = [p.to_local() if hasattr(p, "to_local") else p for p in app_state.model.parameters()]
    return torch.cat([t.detach().reshape(-1) for t in tensors]).unique().tolist()


def _saving(folder: Path, mode: Mode, timeout_s: float = 30, k: int = -1) -> CheckpointSaving:
    execution = make_dcp_execution(folder, "x", dist.get_rank(), mode, timeout_s)
    return CheckpointSaving(SaveKMostRecentCheckpointsStrategy(k), execution)


def _loaded(folder: Path) -> list[float]:
    app_state = _app_state(-1)
    DCPCheckpointLoading(dist.get_rank()).load_checkpoint_(app_state, checkpoints_in(folder)[-1].path)
    return _values(app_state)


class SlowLayer(durability.FileLayer):
    """Takes its time for every write."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def write(self, file: Any, data: Any) -> None:
        time.sleep(self.seconds)
        super().write(file, data)


def _change_while_writing(folder: Path) -> None:
    durability.layer = SlowLayer(0.2)
    saving, app_state = _saving(folder, "async"), _app_state(0)
    for step in range(1, 4):
        _fill(app_state, step)
        begun = time.perf_counter()
        path = saving.save_now(_progress(step), app_state)
        if step == 1:
            assert time.perf_counter() - begun < 5
        assert path is not None
        assert not path.exists(), "it is being written beside training"
        _fill(app_state, -7)
        saving.settle()
        assert path.exists()
        assert _loaded(folder) == [step]


def test_training_may_go_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    run_on_ranks(_change_while_writing, 2, tmp_path)


def _back_to_back(folder: Path) -> None:
    saving, app_state = _saving(folder, "async", k=2), _app_state(0)
    for step in range(1, 21):
        _fill(app_state, step)
        saving.save_now(_progress(step), app_state)
        dist.all_reduce(torch.ones(1))  # training's own collectives go on meanwhile
    saving.settle()
    dist.barrier()  # rank 0 deletes after it has committed
    assert [c.progress.num_seen_steps for c in checkpoints_in(folder)] == [19, 20]
    assert _loaded(folder) == [20]


def test_saves_back_to_back_wait_for_each_other_and_old_ones_go(tmp_path: Path) -> None:
    run_on_ranks(_back_to_back, 2, tmp_path)


def _memory_of_saves(folder: Path) -> int:
    saving, app_state = _saving(folder, "async", k=1), _app_state(0)
    sizes = []
    for step in range(1, 31):
        saving.save_now(_progress(step), app_state)
        saving.settle()
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
    return sizes[-1] - sizes[4]


def test_saving_does_not_take_more_memory_every_time(tmp_path: Path) -> None:
    assert max(run_on_ranks(_memory_of_saves, 2, tmp_path)) < 20 << 20


def _fails_beside_training(folder: Path, rank: int) -> tuple[str, float]:
    saving, app_state = _saving(folder, "async"), _app_state(1)
    saving.save_now(_progress(1), app_state)
    saving.settle()
    if dist.get_rank() == rank:

        def fail(_: str) -> None:
            raise OSError(28, "No space left on device", "data")

        durability.layer = CountingLayer(3, fail)
    saving.save_now(_progress(2), app_state)
    begun = time.monotonic()
    while True:
        flag = torch.tensor([float(saving.has_failed)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag:
            break
        time.sleep(0.01)
    with pytest.raises(CheckpointError) as failure:
        saving.settle()
    return str(failure.value), time.monotonic() - begun


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_beside_training_is_known_to_all_ranks_at_once(tmp_path: Path, rank: int) -> None:
    for message, seconds in run_on_ranks(_fails_beside_training, 2, tmp_path, rank):
        assert f"rank {rank}: No space left on device" in message
        assert "seen_steps_2-" in message
        assert seconds < 5
    assert [c.progress.num_seen_steps for c in checkpoints_in(tmp_path)] == [1]
    assert "seen_steps_1-" in (tmp_path / "last_checkpoint_info.json").read_text()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def _freezes(folder: Path, rank: int) -> tuple[str, float]:
    saving, app_state = _saving(folder, "async", timeout_s=2), _app_state(1)
    saving.save_now(_progress(1), app_state)
    saving.settle()
    if dist.get_rank() == rank:
        durability.layer = CountingLayer(3, lambda _: time.sleep(3600))
    begun = time.monotonic()
    saving.save_now(_progress(2), app_state)
    for _ in range(20):
        dist.all_reduce(torch.ones(1))
    assert time.monotonic() - begun < 2, "a frozen writer delays nobody"
    while not saving.has_failed:
        time.sleep(0.01)
    with pytest.raises(CheckpointError) as failure:
        saving.settle()
    seconds = time.monotonic() - begun
    dist.barrier()
    return str(failure.value), seconds


@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_writer_is_told_by_its_deadline(tmp_path: Path, rank: int) -> None:
    for message, seconds in run_on_ranks(_freezes, 2, tmp_path, rank):
        assert f"rank {rank}: no answer within 2 s" in message
        assert 2 <= seconds < 3.5
    assert [c.progress.num_seen_steps for c in checkpoints_in(tmp_path)] == [1]


def _dies(folder: Path, rank: int, mode: Mode, at: int) -> None:
    saving, app_state = _saving(folder, mode, timeout_s=3), _app_state(1)
    saving.save_now(_progress(1), app_state)
    saving.settle()
    if dist.get_rank() == rank:
        durability.layer = CountingLayer(at, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    begun = time.monotonic()

    def save() -> None:
        saving.save_now(_progress(2), app_state)
        saving.settle()

    with pytest.raises(CheckpointError, match=f"rank {rank}"):
        save()
    assert time.monotonic() - begun < 6


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(("rank", "at"), [(1, 1), (1, 4), (0, 2), (0, 8), (0, 14)])
def test_a_rank_that_dies_while_saving_hangs_nobody(tmp_path: Path, mode: Mode, rank: int, at: int) -> None:
    with pytest.raises(RankFailure, match=f"rank {rank} died: exit code -9"):
        run_on_ranks(_dies, 2, tmp_path, rank, mode, at)
    assert [c.progress.num_seen_steps for c in checkpoints_in(tmp_path)] == [1]
    run_on_ranks(_loads_one, 2, tmp_path)


def _train_for_ever() -> None:
    while True:
        dist.all_reduce(torch.ones(1))


def _leaves_after_a_death(folder: Path) -> None:
    saving, app_state = _saving(folder, "async"), _app_state(1)
    saving.save_now(_progress(1), app_state)
    saving.settle()
    if dist.get_rank() == 1:
        durability.layer = CountingLayer(3, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    saving.save_now(_progress(2), app_state)
    with pytest.raises(RuntimeError):
        _train_for_ever()
    begun = time.monotonic()
    saving.close()
    assert time.monotonic() - begun < 15


def test_who_is_left_does_not_wait_for_a_rank_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 1 died: exit code -9") as failure:
        run_on_ranks(_leaves_after_a_death, 2, tmp_path)
    assert "rank 0 raised" in str(failure.value), "the barrier at the end"
    assert "assert" not in str(failure.value)
    assert [c.progress.num_seen_steps for c in checkpoints_in(tmp_path)] == [1]


def _dies_long_before_the_deadline(folder: Path, rank: int) -> None:
    agreement._GONE_FOR_GOOD_AFTER_S = 1.5
    saving, app_state = _saving(folder, "sync", timeout_s=600), _app_state(1)
    saving.save_now(_progress(1), app_state)
    if dist.get_rank() == rank:
        durability.layer = CountingLayer(3, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match=f"rank {rank}: its process is gone"):
        saving.save_now(_progress(2), app_state)
    assert time.monotonic() - begun < 15


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_gone_is_not_waited_for_until_the_deadline(tmp_path: Path, rank: int) -> None:
    with pytest.raises(RankFailure, match=f"rank {rank} died: exit code -9") as failure:
        run_on_ranks(_dies_long_before_the_deadline, 2, tmp_path, rank)
    assert "DID NOT RAISE" not in str(failure.value)
    assert "assert" not in str(failure.value)


def _fails_while_writing(folder: Path) -> None:
    durability.layer = SlowLayer(0.3)
    saving = _saving(folder, "async")
    saving.save_now(_progress(1), _app_state(1))
    saving.close()


def test_a_save_in_flight_comes_about_though_the_job_has_failed_elsewhere(tmp_path: Path) -> None:
    run_on_ranks(_fails_while_writing, 2, tmp_path)
    run_on_ranks(_loads_one, 2, tmp_path)


def _loads_at_once(folder: Path) -> list[float]:
    durability.layer = SlowLayer(0.2)
    saving, app_state = _saving(folder, "async"), _app_state(1)
    path = saving.save_now(_progress(1), app_state)
    assert path is not None
    assert not path.exists()
    again = _app_state(0)
    DCPCheckpointLoading(dist.get_rank()).load_checkpoint_(again, path)
    return _values(again)


def test_a_checkpoint_may_be_loaded_straight_after_it_was_saved(tmp_path: Path) -> None:
    assert run_on_ranks(_loads_at_once, 2, tmp_path) == [[1], [1]]


def _loads_one(folder: Path) -> None:
    assert _loaded(folder) == [1]


def _other_world(folder: Path, expected: float) -> None:
    assert _loaded(folder) == [expected]


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_another_world_reads_and_shares_the_checking(tmp_path: Path, world_size: int) -> None:
    run_on_ranks(_back_to_back, 2, tmp_path)
    run_on_ranks(_other_world, world_size, tmp_path, 20.0)


def _collectives_of_saves(folder: Path) -> list[int]:
    counts = []
    counted = 0
    originals = {
        name: getattr(dist, name) for name in ("gather_object", "scatter_object_list", "broadcast_object_list")
    }

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal counted
            counted += 1
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    saving, app_state = _saving(folder, "sync"), _app_state(1)
    for step in (1, 2):
        counted = 0
        saving.save_now(_progress(step), app_state)
        counts.append(counted)
    return counts


def test_the_plan_is_made_once(tmp_path: Path) -> None:
    for first, second in run_on_ranks(_collectives_of_saves, 2, tmp_path):
        assert first > 4
        assert second == 0


def _state_of_another_form(folder: Path) -> None:
    saving, app_state = _saving(folder, "async"), _app_state(1)
    saving.save_now(_progress(1), app_state)
    bigger = _app_state(2)
    scheduler = torch.optim.lr_scheduler.ConstantLR(bigger.optimizer)
    bigger.lr_scheduler = scheduler
    saving.save_now(_progress(2), bigger)
    saving.settle()
    again = _app_state(0)
    again.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(again.optimizer)
    DCPCheckpointLoading(dist.get_rank()).load_checkpoint_(again, checkpoints_in(folder)[-1].path)
    assert _values(again) == [2]


def test_a_state_of_another_form_is_planned_anew(tmp_path: Path) -> None:
    run_on_ranks(_state_of_another_form, 2, tmp_path)


def _values_that_differ(folder: Path) -> str:
    app_state = _app_state(1)
    app_state.optimizer.param_groups[0]["lr"] = 0.1 + dist.get_rank()
    with pytest.raises(CheckpointError) as refusal:
        _saving(folder, "sync").save_now(_progress(1), app_state)
    return str(refusal.value)


def test_a_value_that_differs_between_ranks_is_refused(tmp_path: Path) -> None:
    messages = run_on_ranks(_values_that_differ, 2, tmp_path)
    assert all("lr differs from rank 0's" in message for message in messages)


def _saves_and_leaves(folder: Path) -> None:
    durability.layer = SlowLayer(0.1)
    _saving(folder, "async").save_now(_progress(1), _app_state(1))


def test_a_program_that_ends_without_waiting_leaves_a_checkpoint(tmp_path: Path) -> None:
    import subprocess
    import sys

    program = f"""
import torch.distributed as dist
from pathlib import Path
from tests.checkpointing.test_saving_on_ranks import _saves_and_leaves
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
_saves_and_leaves(Path({str(tmp_path)!r}))
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
    assert len(checkpoints_in(tmp_path)) == 1


def _dtypes(folder: Path) -> None:
    model = torch.nn.Linear(8, 4, bias=False)
    model.register_buffer("count", torch.tensor(3))
    model.register_buffer("flags", torch.tensor([True, False]))
    model.register_buffer("empty", torch.empty(0, 4))
    model.register_buffer("reduced", torch.randn(40, 5, dtype=torch.bfloat16).t())
    app_state = AppState(model, torch.optim.SGD(model.parameters(), momentum=0.9))
    DCPCheckpointSaving(folder, "x", 0).save_checkpoint(app_state, _progress(1))
    path = checkpoints_in(folder)[0].path
    stock = {f"app.model.{key}": torch.zeros_like(tensor) for key, tensor in model.state_dict().items()}
    dcp.load(stock, checkpoint_id=path, no_dist=True)
    other = AppState(torch.nn.Linear(8, 4, bias=False), torch.optim.SGD(model.parameters()))
    for name, buffer in model.named_buffers():
        other.model.register_buffer(name, torch.zeros_like(buffer))
    other.optimizer = torch.optim.SGD(other.model.parameters(), momentum=0.9)
    DCPCheckpointLoading(0).load_checkpoint_(other, path)
    for key, tensor in model.state_dict().items():
        assert torch.equal(stock[f"app.model.{key}"], tensor), key
        assert torch.equal(other.model.state_dict()[key], tensor), key


@pytest.mark.filterwarnings("ignore:.*not writable.*")
def test_every_kind_of_tensor_comes_back_also_by_a_stock_reader(tmp_path: Path) -> None:
    run_on_ranks(_dtypes, 1, tmp_path)


def test_the_manifest_tells_what_there_is(tmp_path: Path) -> None:
    run_on_ranks(_back_to_back, 2, tmp_path)
    checkpoint = checkpoints_in(tmp_path)[-1]
    manifest = read_manifest(checkpoint.manifest_path)
    assert manifest is not None
    assert manifest.progress == _progress(20)
    assert (manifest.world_size, manifest.kind, manifest.experiment_id) == (2, "dcp", "x")
    assert manifest.tensors["app.model.0.weight"].shape == [WIDTH, WIDTH]
    assert set(manifest.files) == {"__0_0.distcp", "__1_0.distcp", ".metadata", "resume_state.pt"}
    assert check_content(checkpoint.path, manifest.files) == []
    assert json.loads(checkpoint.manifest_path.read_text())["format_version"] == 1
