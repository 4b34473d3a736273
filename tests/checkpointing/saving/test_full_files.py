"""Full files of FSDP1: equal to what torch gathers at once, streamed, and gone when the disk is full."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.optim import SGD, AdamW, Optimizer

from modalities.checkpointing.saving.full_files import save_full_model, save_full_optimizer
from modalities.durability import FileLayer
from modalities.exceptions import CheckpointError
from modalities.parallel.fsdp1 import full_model_state_dict, full_optimizer_state_dict, shard_model
from modalities.parallel.settings import MixedPrecisionSettings, ShardingStrategy
from modalities.testing.ranks import run_on_ranks

STRATEGIES = list(ShardingStrategy)


class Block(nn.Module):
    """Sizes that leave paddings everywhere, and slices that end within a parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.linear.weight = nn.Parameter(torch.randn(width, width).t())  # not contiguous
        self.gate = nn.Parameter(torch.randn(1))
        self.register_buffer("scale", torch.randn(3))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("table", torch.randn(5), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.gate * self.linear(self.norm(inputs)) * self.scale.mean()


class Model(nn.Module):
    def __init__(self, is_tied: bool, width: int = 7) -> None:
        super().__init__()
        self.wte = nn.Embedding(31, width)
        self.blocks = nn.ModuleDict({str(index): Block(width) for index in range(3)})
        self.head = nn.Linear(width, 31, bias=False)
        if is_tied:
            self.head.weight = self.wte.weight
        self.register_buffer("seen", torch.randn(2, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.wte(inputs)
        for block in self.blocks.values():
            hidden = block(hidden)
        return self.head(hidden)


def _shard(
    strategy: ShardingStrategy,
    is_tied: bool = False,
    precision: MixedPrecisionSettings = MixedPrecisionSettings.NO_MIXED_PRECISION,
) -> FSDP:
    # machines of two ranks
    os.environ["LOCAL_WORLD_SIZE"] = str(min(2, dist.get_world_size()))
    torch.manual_seed(0)
    model = Model(is_tied)
    model.blocks["1"].linear.weight.requires_grad_(False)
    for parameter in model.blocks["2"].parameters():
        parameter.requires_grad_(False)
    return shard_model(model, False, precision, strategy, ["Block"])


def _adam_w(model: FSDP) -> Optimizer:
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2], "lr": torch.tensor(0.01)}, {"params": parameters[1::2], "weight_decay": 0.0}]
    return AdamW(groups, amsgrad=True)


def _sgd(model: FSDP) -> Optimizer:
    return SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1, momentum=0.9)


def _plain_sgd(model: FSDP) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def _train(model: FSDP, optimizer: Optimizer, num_steps: int) -> None:
    for step in range(num_steps):
        model(torch.arange(dist.get_rank(), 20) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _save_both(model: FSDP, optimizer: Optimizer, folder: Path, opener: Any = None) -> list[Any]:
    opener = opener or FileLayer()
    return [
        save_full_model(model, folder / "model.bin", opener),
        save_full_optimizer(model, optimizer, folder / "optimizer.bin", opener),
    ]


def _differences(ours: Any, stock: Any, place: str = "") -> list[str]:
    if isinstance(stock, Tensor):
        is_same = isinstance(ours, Tensor) and ours.dtype == stock.dtype and torch.equal(ours, stock)
        return [] if is_same and ours.stride() == stock.stride() else [place]
    if isinstance(stock, dict):
        if not isinstance(ours, dict) or ours.keys() != stock.keys():
            return [f"{place}: {list(ours)} instead of {list(stock)}"]
        return [found for key in stock for found in _differences(ours[key], stock[key], f"{place}.{key}")]
    if isinstance(stock, list | tuple):
        if type(ours) is not type(stock) or len(ours) != len(stock):
            return [place]
        return [
            found
            for index, (mine, theirs) in enumerate(zip(ours, stock, strict=True))
            for found in _differences(mine, theirs, f"{place}.{index}")
        ]
    return [] if ours == stock else [place]


def _compared(folder: Path, model: FSDP, optimizer: Optimizer) -> list[str]:
    """What differs between the files and the states that torch gathers."""
    records = _save_both(model, optimizer, folder)
    stock = [full_model_state_dict(model), full_optimizer_state_dict(model, optimizer)]
    if dist.get_rank() != 0:
        assert records == [None, None]
        return []
    found = []
    for name, record, state in zip(("model.bin", "optimizer.bin"), records, stock, strict=True):
        content = (folder / name).read_bytes()
        assert (record.size, record.xxh3_128) == (len(content), xxhash.xxh3_128_hexdigest(content))
        for is_mapped in (False, True):
            found += _differences(torch.load(folder / name, weights_only=True, mmap=is_mapped), state, name)
        # a reader that computes the tensors' places from their order
        with torch.utils.serialization.config.patch("load.calculate_storage_offsets", True):
            found += _differences(torch.load(folder / name, weights_only=True, mmap=True), state, name)
        torch.load(folder / name, weights_only=True, map_location="meta")
        (folder / name).unlink()
    assert list(folder.iterdir()) == []
    return found


def _compare_all(folder: Path, strategy: ShardingStrategy) -> list[str]:
    found = []
    for make_optimizer, is_tied in ((_adam_w, False), (_sgd, True), (_plain_sgd, False)):
        model = _shard(strategy, is_tied)
        optimizer = make_optimizer(model)
        for num_steps in (0, 2):
            _train(model, optimizer, num_steps)
            differences = _compared(folder, model, optimizer)
            found += [f"{make_optimizer.__name__}, {num_steps} steps: {place}" for place in differences]
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_files_equal_what_torch_gathers(tmp_path: Path, world_size: int, strategy: ShardingStrategy) -> None:
    assert run_on_ranks(_compare_all, world_size, tmp_path, strategy) == [[]] * world_size


def _compare_between(folder: Path, strategy: ShardingStrategy) -> list[str]:
    model = _shard(strategy, precision=MixedPrecisionSettings.BF_16_WORKING)
    optimizer = _adam_w(model)
    _train(model, optimizer, 1)
    with torch.no_grad():
        model(torch.arange(20))  # leaves some strategies unsharded
    found = _compared(folder, model, optimizer)
    _train(model, optimizer, 1)
    for parameter in model.parameters():
        if parameter.is_contiguous():  # torch knows only these
            parameter.data = parameter.data + 1  # other memory than FSDP1's
    return found + _compared(folder, model, optimizer)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_happened_before_does_not_matter(tmp_path: Path, strategy: ShardingStrategy) -> None:
    assert run_on_ranks(_compare_between, 2, tmp_path, strategy) == [[], []]


def _states_after_training(folder: Path, strategy: ShardingStrategy, saves: bool) -> list[dict[str, Any]]:
    model = _shard(strategy)
    optimizer = _adam_w(model)
    for step in range(2):
        for part in range(2):
            model(torch.arange(dist.get_rank() + part, 20) + step).square().mean().backward()
            if saves and part == 0:
                _save_both(model, optimizer, folder)
                for file in folder.iterdir() if dist.get_rank() == 0 else ():
                    file.unlink()
        optimizer.step()
        optimizer.zero_grad()
    return [full_model_state_dict(model), full_optimizer_state_dict(model, optimizer)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_saving_does_not_change_training(tmp_path: Path, strategy: ShardingStrategy) -> None:
    plain = run_on_ranks(_states_after_training, 2, tmp_path, strategy, False)[0]
    assert _differences(run_on_ranks(_states_after_training, 2, tmp_path, strategy, True)[0], plain) == []


def _tied_places(folder: Path) -> bool:
    model = _shard(ShardingStrategy.FULL_SHARD, is_tied=True)
    _save_both(model, _adam_w(model), folder)
    dist.barrier()
    state = torch.load(folder / "model.bin", weights_only=True)
    return state["wte.weight"].data_ptr() == state["head.weight"].data_ptr()


def test_tied_weights_are_in_the_file_once(tmp_path: Path) -> None:
    assert run_on_ranks(_tied_places, 2, tmp_path) == [True, True]


class FullDisk(FileLayer):
    """A disk that has room for some bytes of each file."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = self.remaining = num_bytes

    def create(self, path: Path) -> IO[bytes]:
        self.remaining = self.num_bytes
        return super().create(path)

    def write(self, file: IO[bytes], data: Any) -> None:
        super().write(file, memoryview(data)[: self.remaining])
        if len(data) > self.remaining:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.remaining -= len(data)


class FailingSync(FileLayer):
    def sync(self, file: IO[bytes]) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


class MissingFolder(FileLayer):
    def create(self, path: Path) -> IO[bytes]:
        return super().create(path / "absent" / "file")


def _fail(folder: Path, make_opener: Callable[[], FileLayer]) -> list[str]:
    torch.manual_seed(0)
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(300, 300)) for _ in range(6)])
    model = shard_model(
        blocks, False, MixedPrecisionSettings.NO_MIXED_PRECISION, ShardingStrategy.FULL_SHARD, ["Linear"]
    )
    optimizer = AdamW(model.parameters())
    model(torch.ones(2, 300)).mean().backward()
    optimizer.step()
    messages = []
    for save in (
        lambda: save_full_model(model, folder / "model.bin", make_opener()),
        lambda: save_full_optimizer(model, optimizer, folder / "optimizer.bin", make_opener()),
    ):
        start = time.monotonic()
        with pytest.raises(CheckpointError) as failure:
            save()
        assert time.monotonic() - start < 5
        messages.append(str(failure.value))
        assert dist.get_rank() != 0 or list(folder.iterdir()) == []
    # the ranks are still in step
    assert _compared(folder, model, optimizer) == []
    return messages


@pytest.mark.parametrize(
    ("make_opener", "cause"),
    [
        (lambda: FullDisk(0), "No space left on device"),
        (lambda: FullDisk(1_000_000), "No space left on device"),
        (FailingSync, "Input/output error"),
        (MissingFolder, "No such file or directory"),
    ],
)
def test_a_failure_of_the_disk_is_told_on_all_ranks_and_leaves_nothing(
    tmp_path: Path, make_opener: Callable[[], FileLayer], cause: str
) -> None:
    assert run_on_ranks(_fail, 2, tmp_path, make_opener) == [[cause] * 2, [f"rank 0: {cause}"] * 2]


def _occupied(folder: Path) -> str:
    model = _shard(ShardingStrategy.FULL_SHARD)
    with pytest.raises(CheckpointError) as failure:
        save_full_model(model, folder / "model.bin", FileLayer())
    return str(failure.value)


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"of another")
    assert run_on_ranks(_occupied, 2, tmp_path) == ["File exists", "rank 0: File exists"]
    assert (tmp_path / "model.bin").read_bytes() == b"of another"


def _disagree(folder: Path, spoil: Callable[[dict[str, Any]], None]) -> str:
    model = _shard(ShardingStrategy.FULL_SHARD)
    optimizer = _sgd(model) if spoil is _forget else _adam_w(model)
    _train(model, optimizer, 1)
    if dist.get_rank() == 1:
        for state in optimizer.state.values():
            spoil(state)
    with pytest.raises(CheckpointError) as failure:
        save_full_optimizer(model, optimizer, folder / "optimizer.bin", FileLayer())
    assert list(folder.iterdir()) == []
    return str(failure.value)


def _step_further(state: dict[str, Any]) -> None:
    state["step"] += 1


def _forget(state: dict[str, Any]) -> None:
    state.clear()


@pytest.mark.parametrize(("spoil", "told"), [(_step_further, "differs among the ranks"), (_forget, "elements on all")])
def test_states_that_do_not_fit_together_are_refused(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None], told: str
) -> None:
    for message in run_on_ranks(_disagree, 2, tmp_path, spoil):
        assert told in message


def _memory_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def _peak_mb(save: Callable[[], Any]) -> float:
    """The most memory that this process has while saving."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    save()
    return _memory_mb("VmHWM")


def _extra_mb(folder: Path) -> list[float]:
    """By how much saving the model, then the optimizer, raises this process's memory at most."""
    units = [nn.Sequential(nn.Linear(2048, 2048, bias=False)) for _ in range(8)]
    model = shard_model(
        nn.Sequential(*units),
        False,
        MixedPrecisionSettings.NO_MIXED_PRECISION,
        ShardingStrategy.FULL_SHARD,
        ["Linear"],
    )
    optimizer = AdamW(model.parameters())
    model(torch.ones(1, 2048)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(torch.ones(1, 2048))  # FSDP1 frees the gradients
    before = _memory_mb("VmRSS")
    return [
        _peak_mb(lambda: save_full_model(model, folder / "model.bin", FileLayer())) - before,
        _peak_mb(lambda: save_full_optimizer(model, optimizer, folder / "optimizer.bin", FileLayer())) - before,
    ]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_one_unit_at_a_time_is_in_memory(tmp_path: Path) -> None:
    of_rank_zero, of_rank_one = run_on_ranks(_extra_mb, 2, tmp_path)
    unit_mb = 2048 * 2048 * 4 / 2**20
    sizes_mb = [(tmp_path / name).stat().st_size / 2**20 for name in ("model.bin", "optimizer.bin")]
    assert sizes_mb == pytest.approx([8 * unit_mb, 16 * unit_mb], abs=1)
    assert max(of_rank_zero) <= unit_mb + 100, of_rank_zero
    assert max(of_rank_one) <= 60, of_rank_one
