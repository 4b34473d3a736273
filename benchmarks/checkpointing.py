"""What saving and loading cost, beside the limits of the machine and beside stock torch, in one run.

    python benchmarks/checkpointing.py [--megabytes 1200] [--rounds 5] [--folder DIR]

Two gloo ranks on the CPU hold a sharded model with AdamW's state. Every way of saving or loading is run in turn, round
after round, so that all of them meet the same noise; printed are medians of wall time, CPU time over both ranks, and the
ratio to the limit that leads each block: a raw fsynced write, a bare copy, a raw read of the same bytes.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.checkpoint_saving import make_dcp_execution
from modalities.checkpointing.fsdp.fsdp_checkpoint_loading import DCPCheckpointLoading
from modalities.checkpointing.fsdp.fsdp_checkpoint_saving import FSDP1CheckpointSaving
from modalities.checkpointing.reading.load_planner import LoadingOptions
from modalities.checkpointing.saving.writer import SaveTimes
from modalities.checkpointing.verification import Level
from modalities.parallel.fsdp1 import full_model_state_dict, full_optimizer_state_dict, shard_model
from modalities.parallel.settings import MixedPrecisionSettings, ShardingStrategy
from modalities.progress import TrainingProgress
from modalities.testing.ranks import run_on_ranks

WORLD_SIZE = 2
NUM_LAYERS = 32
BLOCK_BYTES = 4 << 20
WRITER = "  of it its writer"

Measured = tuple[float, float]
"""Wall and CPU seconds of a rank."""


class Block(nn.Module):
    """A layer that is sharded on its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + torch.tanh(self.linear(values))


def width_for(megabytes: float) -> int:
    """Width at which weights and two moments in fp32 make up that size."""
    return int((megabytes * 1e6 / (NUM_LAYERS * 3 * 4)) ** 0.5)


def make_app_state(width: int, *, with_fsdp1: bool = False) -> AppState:
    model: nn.Module = nn.Sequential(*(Block(width) for _ in range(NUM_LAYERS)))
    if with_fsdp1:
        precision, strategy = MixedPrecisionSettings.NO_MIXED_PRECISION, ShardingStrategy.FULL_SHARD
        model = shard_model(model, True, precision, strategy, ["Block"])
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    app_state = AppState(model, torch.optim.AdamW(model.parameters()))
    model(torch.randn(2, width)).mean().backward()
    app_state.optimizer.step()
    app_state.optimizer.zero_grad(set_to_none=True)
    return app_state


def progress(step: int) -> TrainingProgress:
    return TrainingProgress(step, step, 10**6, 10**6)


def measure(work: Callable[[], Any]) -> Measured:
    os.sync()  # what was written and removed before is not this one's to pay
    dist.barrier()
    wall, cpu = time.perf_counter(), cpu_seconds()
    work()
    return time.perf_counter() - wall, cpu_seconds() - cpu


def cpu_seconds() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def peak_bytes(work: Callable[[], Any]) -> int:
    """Resident memory that the work took at most beyond what there was before."""

    def field(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    Path("/proc/self/clear_refs").write_text("5")
    before = field("VmRSS")
    work()
    return field("VmHWM") - before


def local_tensors(app_state: AppState) -> list[torch.Tensor]:
    state = app_state.state_dict()
    values = [*state["model"].values(), *state["optimizer"].values()]
    return [v.to_local() if hasattr(v, "to_local") else v for v in values if isinstance(v, torch.Tensor)]


def buffers_like(app_state: AppState) -> torch.Tensor:
    size = sum(tensor.nbytes for tensor in local_tensors(app_state))
    return torch.ones(size, dtype=torch.uint8)


def raw_write(buffer: torch.Tensor, path: Path) -> None:
    """What any checkpoint must do at least."""
    view = memoryview(buffer.numpy())
    with path.open("xb", buffering=0) as file:
        for start in range(0, len(view), BLOCK_BYTES):
            file.write(view[start : start + BLOCK_BYTES])
        os.fsync(file.fileno())
    dist.barrier()


def raw_read(buffer: torch.Tensor, path: Path) -> None:
    view = memoryview(buffer.numpy())
    with path.open("rb", buffering=0) as file:
        start = 0
        while start < len(view):
            start += file.readinto(view[start : start + BLOCK_BYTES])
    dist.barrier()


def forget(folder: Path) -> None:
    """Drop the folder's files from the page cache."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
    dist.barrier()


def clean(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    dist.barrier()


def rotated(ways: dict[str, Callable[[], Any]], number: int) -> list[tuple[str, Callable[[], Any]]]:
    """In another order every round: who comes after whom matters to a disk."""
    items = list(ways.items())
    number %= len(items)
    return items[number:] + items[:number]


class Ours:
    """Saving through the package's own class."""

    def __init__(self, folder: Path, mode: Any) -> None:
        self.saving = make_dcp_execution(folder, "benchmark", dist.get_rank(), mode, 600)
        self.step = 0

    def save(self, app_state: AppState) -> Path:
        self.step += 1
        return self.saving.save_checkpoint(app_state, progress(self.step))

    @property
    def times(self) -> SaveTimes:
        """Of the last save."""
        assert self.saving._saver is not None
        return self.saving._saver.last_times


def saves(folder: Path, megabytes: float, rounds: int) -> dict[str, list[Measured]]:
    """Synchronous saves; then what training waits for in asynchronous ones."""
    torch.manual_seed(0)
    app_state = make_app_state(width_for(megabytes))
    buffer = buffers_like(app_state)
    tensors = local_tensors(app_state)
    arena = [torch.ones_like(tensor) for tensor in tensors]
    rank = dist.get_rank()
    ours, beside = Ours(folder / "ours", "sync"), Ours(folder / "beside", "async")
    futures: list[Any] = []

    def stock() -> None:
        dcp.save({"app": app_state}, checkpoint_id=folder / "stock", storage_writer=None)

    def stock_async(kind: AsyncCheckpointerType) -> None:
        writer = dcp.FileSystemWriter(folder / f"stock-{kind.value}")
        futures.append(dcp.async_save({"app": app_state}, storage_writer=writer, async_checkpointer_type=kind))

    def torch_save() -> None:
        with (folder / "torch" / f"{rank}.pt").open("wb") as file:
            torch.save(app_state.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        dist.barrier()

    ways: dict[str, Callable[[], Any]] = {
        "raw fsynced write": lambda: raw_write(buffer, folder / "raw" / str(rank)),
        "modalities, sync": lambda: ours.save(app_state),
        "dcp.save": stock,
        "torch.save of each rank's state": torch_save,
    }
    results: dict[str, list[Measured]] = {name: [] for name in (*ways, WRITER)}
    for number in range(rounds + 1):
        for name, work in rotated(ways, number):
            for name_of_folder in ("raw", "ours", "stock", "torch"):
                clean(folder / name_of_folder)
            # all meet the page cache as a raw write leaves it
            raw_write(buffer, folder / "raw" / str(rank))
            clean(folder / "raw")
            measured = measure(work)
            if number:
                results[name].append(measured)
                if work is ways["modalities, sync"]:
                    results[WRITER].append((ours.times.write_s + ours.times.commit_s, ours.times.cpu_s))

    blocked: dict[str, Callable[[], Any]] = {
        "_foreach_copy_": lambda: torch._foreach_copy_(arena, tensors),
        "modalities, async": lambda: beside.save(app_state),
        "dcp.async_save, thread": lambda: stock_async(AsyncCheckpointerType.THREAD),
        "dcp.async_save, process": lambda: stock_async(AsyncCheckpointerType.PROCESS),
    }
    results |= {name: [] for name in blocked}
    results["modalities, async, first"] = []
    for number in range(rounds + 1):
        for name, work in blocked.items():
            for name_of_folder in ("beside", "stock-thread", "stock-process"):
                clean(folder / name_of_folder)
            measured = measure(work)
            beside.saving.settle()
            while futures:
                futures.pop().result()
            if number:
                results[name].append(measured)
            elif name == "modalities, async":
                results["modalities, async, first"].append(measured)
    return results


def loads(folder: Path, megabytes: float, rounds: int) -> dict[str, list[Measured]]:
    """Loads of what lies in the page cache, and of what does not."""
    torch.manual_seed(0)
    app_state = make_app_state(width_for(megabytes))
    buffer = buffers_like(app_state)
    rank = dist.get_rank()
    clean(folder / "loaded")
    path = Ours(folder / "loaded", "sync").save(app_state)
    clean(folder / "raw")
    raw_write(buffer, folder / "raw" / str(rank))

    def ours(verify: Level) -> None:
        target = make_shell(app_state)
        loading = DCPCheckpointLoading(rank)
        loading.options = LoadingOptions(verify=verify)
        loading.load_checkpoint_(target, path)

    def stock() -> None:
        dcp.load({"app": make_shell(app_state)}, checkpoint_id=path)

    def raw_twice() -> None:
        """What verifying before the first tensor changes comes to: one read from where it lies, one from memory."""
        for _ in range(2):
            raw_read(buffer, folder / "raw" / str(rank))

    ways: dict[str, Callable[[], Any]] = {
        "raw read": lambda: raw_read(buffer, folder / "raw" / str(rank)),
        "raw read, twice": raw_twice,
        "modalities, verified": lambda: ours("full"),
        "modalities, unverified": lambda: ours("off"),
        "dcp.load": stock,
    }
    results: dict[str, list[Measured]] = {}
    for place in ("warm", "cold"):
        results |= {f"{name}, {place}": [] for name in ways}
        for number in range(rounds + 1):
            for name, work in rotated(ways, number):
                if place == "cold":
                    # all meet the page cache as a raw read leaves it
                    forget(folder)
                    raw_read(buffer, folder / "raw" / str(rank))
                    forget(folder)
                measured = measure(work)
                if number:
                    results[f"{name}, {place}"].append(measured)
    return results


def make_shell(app_state: AppState) -> AppState:
    """The same tensors in a state that nothing was loaded into yet."""
    return AppState(app_state.model_parts, app_state.optimizer, app_state.lr_scheduler)


def memory(folder: Path, megabytes: float) -> dict[str, float]:
    """Peaks beyond the state itself, in megabytes, and the state's size."""
    torch.manual_seed(0)
    app_state = make_app_state(width_for(megabytes))
    clean(folder / "memory")
    beside = Ours(folder / "memory", "async")
    size = sum(tensor.nbytes for tensor in local_tensors(app_state))

    def save() -> None:
        beside.save(app_state)
        beside.saving.settle()

    first, later = peak_bytes(save), peak_bytes(save)
    path = beside.save(app_state)
    beside.saving.settle()
    beside.saving._saver = None
    load = peak_bytes(lambda: DCPCheckpointLoading(dist.get_rank()).load_checkpoint_(make_shell(app_state), path))
    return {
        "a rank's state": size / 1e6,
        "async save, first": first / 1e6,
        "async save, later": later / 1e6,
        "load, verified": load / 1e6,
    }


def full_files(folder: Path, megabytes: float) -> dict[str, float]:
    """FSDP1 full files: seconds, and peaks in megabytes on rank 0."""
    torch.manual_seed(0)
    app_state = make_app_state(width_for(megabytes), with_fsdp1=True)
    model: Any = app_state.model
    clean(folder / "full")
    saving = FSDP1CheckpointSaving(folder / "full", "benchmark", dist.get_rank())

    def stock() -> None:
        model_state = full_model_state_dict(model)
        optimizer_state = full_optimizer_state_dict(model, app_state.optimizer)
        if dist.get_rank() == 0:
            for name, state in (("model", model_state), ("optimizer", optimizer_state)):
                with (folder / name).open("wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
        dist.barrier()

    def ours() -> None:
        saving.save_checkpoint(app_state, progress(1))

    results = {}
    for name, work in (("modalities", ours), ("gathered, torch.save", stock)):
        peak = peak_bytes(lambda: results.update({f"{name}, s": measure(work)[0]}))  # noqa: B023
        results[f"{name}, MB"] = peak / 1e6
    return results


def slow_down(folder: Path, megabytes: float) -> dict[str, list[float]]:
    """Step times of one rank on one core, alone and while a writer is at work on the other."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    app_state = make_app_state(width_for(megabytes))
    clean(folder / "beside")
    beside = Ours(folder / "beside", "async")
    left, right = torch.randn(512, 512), torch.randn(512, 512)
    times: dict[str, list[float]] = {"alone": [], "thread": [], "process": []}

    def steps(kind: str, busy: Callable[[], bool]) -> None:
        while busy():
            begun = time.perf_counter()
            for _ in range(10):
                torch.mm(left, right)
            times[kind].append(time.perf_counter() - begun)

    for _ in range(6):
        end = time.perf_counter() + 0.5
        steps("alone", lambda: time.perf_counter() < end)  # noqa: B023
        path = beside.save(app_state)
        steps("thread", lambda: not path.exists())  # noqa: B023
        beside.saving.settle()
        saver = beside.saving._saver
        assert saver is not None
        assert saver.snapshot is not None
        arena = saver.snapshot._arena
        process = os.fork()
        if process == 0:
            os.nice(5)
            raw = folder / "process"
            raw.unlink(missing_ok=True)
            view = memoryview(arena.numpy())
            with raw.open("wb", buffering=0) as file:
                for start in range(0, len(view), BLOCK_BYTES):
                    file.write(view[start : start + BLOCK_BYTES])
                os.fsync(file.fileno())
            os._exit(0)
        steps("process", lambda: os.waitpid(process, os.WNOHANG) == (0, 0))  # noqa: B023
    return times


def table(title: str, limit: str, by_rank: list[dict[str, list[Measured]]], names: list[str]) -> None:
    print(f"\n{title:<36} {'wall s':>9} {'ratio':>7} {'CPU s':>9} {'ratio':>7}")
    medians = {}
    for name in names:
        walls = [max(of_rank[name][i][0] for of_rank in by_rank) for i in range(len(by_rank[0][name]))]
        cpus = [sum(of_rank[name][i][1] for of_rank in by_rank) for i in range(len(by_rank[0][name]))]
        medians[name] = (statistics.median(walls), statistics.median(cpus))
    for name, (wall, cpu) in medians.items():
        least_wall, least_cpu = medians[limit]
        print(f"{name:<36} {wall:>9.3f} {wall / least_wall:>7.2f} {cpu:>9.3f} {cpu / least_cpu:>7.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1200, help="of the whole state, over both ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; by default a temporary one")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger().setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        arguments = (folder, options.megabytes, options.rounds)
        print(f"{options.megabytes:.0f} MB of state on {WORLD_SIZE} ranks, {options.rounds} rounds, medians")
        saved = run_on_ranks(saves, WORLD_SIZE, *arguments, timeout_s=1800)
        names = list(saved[0])
        table("save, durable", names[0], saved, [*names[:2], WRITER, *names[2:4]])
        table("training waits", names[5], saved, names[5:])
        loaded = run_on_ranks(loads, WORLD_SIZE, *arguments, timeout_s=1800)
        names = list(loaded[0])
        half = len(names) // 2
        table("load, from the page cache", names[0], loaded, names[:half])
        table("load, from the disk", names[half], loaded, names[half:])
        peaks = run_on_ranks(memory, WORLD_SIZE, folder, options.megabytes, timeout_s=600)
        print("\nextra memory of a rank, MB")
        for key in peaks[0]:
            print(f"  {key:<34} {max(of_rank[key] for of_rank in peaks):>9.1f}")
        full = run_on_ranks(full_files, WORLD_SIZE, folder, options.megabytes, timeout_s=600)
        print("\nFSDP1 full files                       wall s   extra MB on rank 0   on rank 1")
        for kind in ("modalities", "gathered, torch.save"):
            first, second = (of_rank[f"{kind}, MB"] for of_rank in full)
            print(f"  {kind:<34} {full[0][f'{kind}, s']:>9.3f} {first:>20.1f} {second:>11.1f}")
        (times,) = run_on_ranks(slow_down, 1, folder, options.megabytes / 2, timeout_s=600)
        print("\nstep beside a writer, spare core")
        alone = statistics.median(times["alone"])
        for kind, values in times.items():
            print(f"  {kind:<34} {statistics.median(values) / alone:>9.3f}")


if __name__ == "__main__":
    main()
