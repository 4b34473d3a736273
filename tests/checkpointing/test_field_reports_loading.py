"""Loading under the circumstances in which users of this kind of software have got wrong weights, or none."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.checkpoint_saving import CheckpointSaving, make_dcp_execution
from modalities.checkpointing.discovery import checkpoints_in
from modalities.checkpointing.fsdp.fsdp_checkpoint_loading import DCPCheckpointLoading, FSDP1CheckpointLoading
from modalities.checkpointing.fsdp.fsdp_checkpoint_saving import DCPCheckpointSaving
from modalities.checkpointing.manifest import read_manifest
from modalities.checkpointing.reading.load_planner import LoadingOptions
from modalities.checkpointing.restoring import restore_
from modalities.checkpointing.retention import SaveKMostRecentCheckpointsStrategy
from modalities.checkpointing.torch_checkpoint_loading import TorchCheckpointLoading
from modalities.exceptions import CheckpointError, UserError
from modalities.parallel.process_group import on_rank_zero
from modalities.parallel.settings import MixedPrecisionSettings, ShardingStrategy
from modalities.progress import TrainingProgress
from modalities.testing.ranks import run_on_ranks
from modalities.testing.tiny import read_tensors
from tests.optim.test_schedulers import CASES, make_scheduler

PROGRESS = TrainingProgress(2, 20, 9, 90)

MakeOptimizer = Callable[[nn.Module], Optimizer]


def _adam_w(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters())


def _model(seed: int, num_layers: int = 2) -> nn.Module:
    """Its parameters are smaller than a few ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(num_layers)], nn.Linear(3, 1))


def _app_state(seed: int, make_optimizer: MakeOptimizer = _adam_w, num_layers: int = 2) -> AppState:
    model = _model(seed, num_layers)
    if dist.is_initialized() and dist.get_world_size() > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return AppState(model, make_optimizer(model))


def _train(app_state: AppState, num_steps: int) -> None:
    for step in range(num_steps):
        app_state.model(torch.ones(2, 3) + step).square().mean().backward()
        app_state.optimizer.step()
        app_state.optimizer.zero_grad()
        if app_state.lr_scheduler is not None:
            app_state.lr_scheduler.step()


def _whole(app_state: AppState) -> dict[str, Any]:
    """Model and optimizer, unsharded, by key."""
    state = app_state.state_dict()
    return {
        f"{part}.{key}": (value.full_tensor() if isinstance(value, DTensor) else value)
        for part in ("model", "optimizer")
        for key, value in state[part].items()
    }


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [
        key
        for key, value in one.items()
        if not (torch.equal(value, other[key]) if isinstance(value, Tensor) else value == other[key])
    ]


def _save(folder: Path, app_state: AppState) -> Path:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return DCPCheckpointSaving(folder, "x", rank).save_checkpoint(app_state, PROGRESS)


def _load(app_state: AppState, folder: Path, options: LoadingOptions | None = None) -> AppState:
    loading = DCPCheckpointLoading(dist.get_rank() if dist.is_initialized() else 0)
    loading.options = options or LoadingOptions()
    return loading.load_checkpoint_(app_state, checkpoints_in(folder)[-1].path)


def _refusal(app_state: AppState, folder: Path, options: LoadingOptions | None = None) -> str:
    with pytest.raises(CheckpointError) as refusal:
        _load(app_state, folder, options)
    return str(refusal.value)


def _told(message: str) -> list[str]:
    return [" ".join(line.split()) for line in message.splitlines()[1:] if line.split()[0] in ("missing", "unexpected")]


def test_the_message_lists_exactly_the_keys_that_differ(tmp_path: Path) -> None:
    weights = LoadingOptions(include=["model.*"])
    _save(tmp_path / "small", _app_state(0, num_layers=1))
    _save(tmp_path / "big", _app_state(0, num_layers=2))
    bigger = _refusal(_app_state(0, num_layers=2), tmp_path / "small", weights)
    assert _told(bigger) == ["missing app.model.2.weight", "missing app.model.2.bias"]
    assert "2 missing, 0 unexpected, 2 of another shape" in bigger
    smaller = _refusal(_app_state(0, num_layers=1), tmp_path / "big", weights)
    assert _told(smaller) == ["unexpected app.model.2.weight", "unexpected app.model.2.bias"]
    assert "0 missing, 2 unexpected, 2 of another shape" in smaller


def test_a_renamed_key_is_told_with_its_neighbour(tmp_path: Path) -> None:
    for name in ("attention", "attention_1"):
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False)})
        app_state = AppState(model, SGD(model.parameters()))
        if name == "attention":
            _save(tmp_path, app_state)
    assert _told(_refusal(app_state, tmp_path, LoadingOptions(include=["model.*"]))) == [
        "missing app.model.attention_1.weight (the checkpoint has app.model.attention.weight)",
        "unexpected app.model.attention.weight (the run has app.model.attention_1.weight)",
    ]


def test_a_parameter_without_optimizer_state_is_named(tmp_path: Path) -> None:
    saved = _app_state(0)
    _train(saved, 1)
    state = saved.state_dict()
    for key in [key for key in state["optimizer"] if key.startswith("state.1.weight.")]:
        del state["optimizer"][key]
    folder = tmp_path / "eid_x-seen_steps_2-seen_tokens_20-target_steps_9-target_tokens_90"
    dcp.save({"app": state}, checkpoint_id=folder, no_dist=True)
    told = _told(_refusal(_app_state(1), tmp_path))
    assert sorted(told) == [
        f"missing app.optimizer.state.1.weight.{name}" for name in ("exp_avg", "exp_avg_sq", "step")
    ]


def _checkpointed(module: nn.Module) -> nn.Module:
    return checkpoint_wrapper(module)


def _compiled(module: nn.Module) -> nn.Module:
    wrapped: nn.Module = torch.compile(module)  # type: ignore[assignment]
    return wrapped


NESTINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda block: block,
    "compiled": _compiled,
    "checkpointed": _checkpointed,
    "checkpointed, compiled": lambda block: _checkpointed(_compiled(block)),
    "compiled, checkpointed": lambda block: _compiled(_checkpointed(block)),
}


def _nested(nesting: str, seed: int, whole_compiled: bool = False) -> AppState:
    torch.manual_seed(seed)
    blocks = nn.Sequential(*[NESTINGS[nesting](nn.Linear(2, 2)) for _ in range(2)])
    model = _compiled(blocks) if whole_compiled else blocks
    optimizer = AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return AppState(model, optimizer)


@pytest.mark.parametrize("whole_compiled", [False, True])
@pytest.mark.parametrize("nesting", NESTINGS)
def test_wrappers_leave_no_trace_in_the_keys(tmp_path: Path, nesting: str, whole_compiled: bool) -> None:
    wrapped, plain = _nested(nesting, 0, whole_compiled), _nested("plain", 1)
    keys = _whole(plain).keys()
    _save(tmp_path / "wrapped", wrapped)
    _save(tmp_path / "plain", plain)
    assert _whole(wrapped).keys() == keys
    assert _differing(_whole(_load(_nested("plain", 2), tmp_path / "wrapped")), _whole(wrapped)) == []
    again = _load(_nested(nesting, 2, whole_compiled), tmp_path / "plain")
    assert _differing(_whole(again), _whole(plain)) == []


def test_keys_that_other_tools_left_wrapped_are_understood(tmp_path: Path) -> None:
    saved, folder = _nested("plain", 0), tmp_path / "eid_x-seen_steps_2-seen_tokens_20-target_steps_9-target_tokens_90"

    def wrapped(state: dict[str, Any]) -> dict[str, Any]:
        return {key.replace("0.", "0._orig_mod.", 1): value for key, value in state.items()}

    state = saved.state_dict()
    assert "0._orig_mod.weight" in wrapped(state["model"])
    dcp.save({"app": {part: wrapped(state[part]) for part in state}}, checkpoint_id=folder, no_dist=True)
    torch.save(wrapped(state["model"]), tmp_path / "model.bin")
    assert _differing(_whole(_load(_nested("plain", 1), tmp_path)), _whole(saved)) == []
    for path in (folder, tmp_path / "model.bin"):
        model = TorchCheckpointLoading(torch.device("cpu")).load_model_checkpoint(_nested("plain", 1).model, path)
        assert _differing(model.state_dict(), state["model"]) == []


def _fail_to_exist(folder: Path) -> dict[str, Any]:
    app_state = _app_state(1)
    if dist.get_rank() == 1:
        inside = folder.resolve()
        for question in ("exists", "is_dir", "is_file"):
            ask = getattr(Path, question)
            setattr(Path, question, lambda path, ask=ask: inside not in path.resolve().parents and ask(path))
    (checkpoint,) = on_rank_zero(lambda: checkpoints_in(folder))
    assert restore_(app_state, checkpoint) is not None
    return _whole(app_state)


@pytest.mark.parametrize("has_manifest", [True, False])
def test_rank_zero_alone_decides_what_is_there(tmp_path: Path, has_manifest: bool) -> None:
    saved, _ = run_on_ranks(_train_and_save, 2, tmp_path)
    if not has_manifest:
        checkpoints_in(tmp_path)[0].manifest_path.unlink()
    for loaded in run_on_ranks(_fail_to_exist, 2, tmp_path):
        assert _differing(loaded, saved) == []


def _train_and_save(folder: Path) -> dict[str, Any]:
    app_state = _app_state(0)
    _train(app_state, 2)
    _save(folder, app_state)
    return _whole(app_state)


def _load_anew(folder: Path) -> dict[str, Any]:
    return _whole(_load(_app_state(1), folder))


@pytest.mark.parametrize(("saving", "loading"), [(1, 4), (2, 1), (3, 2), (4, 3)])
def test_moments_come_back_in_any_world_though_some_shards_are_empty(tmp_path: Path, saving: int, loading: int) -> None:
    (saved, *_) = run_on_ranks(_train_and_save, saving, tmp_path)
    assert any(saved[key].any() for key in saved if key.endswith("exp_avg"))
    for loaded in run_on_ranks(_load_anew, loading, tmp_path):
        assert _differing(loaded, saved) == []


def _with_scheduler(case: str, make_optimizer: type[Adam], implementation: dict[str, bool], seed: int) -> AppState:
    def make(model: nn.Module) -> Optimizer:
        weights, biases = ([p for p in model.parameters() if (p.ndim == 2) is flat] for flat in (True, False))
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
        return make_optimizer(groups, lr=0.2, **implementation)

    app_state = _app_state(seed, make)
    variant, fields = CASES[case]
    app_state.lr_scheduler = make_scheduler(variant, app_state.optimizer, **fields)  # type: ignore[arg-type]
    return app_state


def _parts(app_state: AppState) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    assert app_state.lr_scheduler is not None
    groups = [{k: v for k, v in group.items() if k != "params"} for group in app_state.optimizer.param_groups]
    return _whole(app_state), groups, app_state.lr_scheduler.state_dict()


def _save_half_way(folder: Path, *kind: Any) -> list[Any]:
    app_state = _with_scheduler(*kind, 0)
    _train(app_state, 3)
    _save(folder, app_state)
    half_way = _parts(app_state)
    _train(app_state, 3)
    return [half_way, _parts(app_state)]


def _go_on(folder: Path, *kind: Any) -> list[Any]:
    app_state = _load(_with_scheduler(*kind, 1), folder)
    half_way = _parts(app_state)
    _train(app_state, 3)
    return [half_way, _parts(app_state)]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("make_optimizer", [Adam, AdamW])
@pytest.mark.parametrize(
    ("case", "implementation"),
    [(case, [{"fused": True}, {"foreach": True}, {}][index % 3]) for index, case in enumerate(CASES)],
)
def test_a_new_process_goes_on_with_every_optimizer_and_schedule(
    tmp_path: Path, case: str, make_optimizer: type[Adam], implementation: dict[str, bool]
) -> None:
    kind = (case, make_optimizer, implementation)
    (unbroken,) = run_on_ranks(_save_half_way, 1, tmp_path, *kind)
    (resumed,) = run_on_ranks(_go_on, 1, tmp_path, *kind)
    for (state, groups, schedule), (expected, expected_groups, expected_schedule) in zip(
        resumed, unbroken, strict=True
    ):
        assert _differing(state, expected) == []
        assert groups == expected_groups
        assert "initial_lr" in groups[0]
        assert schedule == expected_schedule


def _train_with_saves(folder: Path, mode: Any) -> dict[str, Any]:
    app_state = _app_state(0)
    execution = make_dcp_execution(folder, "x", dist.get_rank(), mode or "sync", 30)
    saving = CheckpointSaving(SaveKMostRecentCheckpointsStrategy(-1 if mode else 0), execution)
    for step in range(4):
        if step < 3:
            saving.save_now(TrainingProgress(step, 10 * step, 9, 90), app_state)
        _train(app_state, 1)
    saving.settle()
    assert len(checkpoints_in(folder)) == (3 if mode else 0)
    return _whole(app_state)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_that_saves_is_the_run_that_does_not(tmp_path: Path, mode: str) -> None:
    plain, *_ = run_on_ranks(_train_with_saves, 2, tmp_path / "plain", None)
    for saved in run_on_ranks(_train_with_saves, 2, tmp_path / "saves", mode):
        assert _differing(saved, plain) == []


def _wrapped(wrapper: str, seed: int) -> AppState:
    model = _model(seed)
    if wrapper == "fsdp1":
        model = FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return AppState(model, _adam_w(model))


def _save_wrapped(folder: Path, wrapper: str) -> list[float]:
    app_state = _wrapped(wrapper, 0)
    _save(folder, app_state)
    return _next_losses(app_state)


def _load_wrapped(folder: Path, wrapper: str) -> list[float]:
    return _next_losses(_load(_wrapped(wrapper, 1), folder))


def _next_losses(app_state: AppState) -> list[float]:
    losses = []
    for _ in range(3):
        loss = app_state.model(torch.ones(2, 3)).square().mean()
        loss.backward()
        app_state.optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*_get_pg_default_device", "ignore:Multiple backends")
@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_a_checkpoint_holds_every_number_of_the_sharded_model(tmp_path: Path, wrapper: str) -> None:
    expected = _model(0).state_dict()
    losses = run_on_ranks(_save_wrapped, 2, tmp_path, wrapper)
    (checkpoint,) = checkpoints_in(tmp_path)
    manifest = read_manifest(checkpoint.manifest_path)
    assert manifest is not None
    described = {k.removeprefix("app.model."): v for k, v in manifest.tensors.items() if k.startswith("app.model.")}
    assert {key: tuple(form.shape) for key, form in described.items()} == {k: v.shape for k, v in expected.items()}
    stored = read_tensors(checkpoint.path)
    assert [key for key in expected if not torch.equal(stored[f"app.model.{key}"], expected[key])] == []
    assert run_on_ranks(_load_wrapped, 2, tmp_path, wrapper) == losses


def _grouped(seed: int, order: list[list[str]]) -> AppState:
    torch.manual_seed(seed)
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abcd"})
    settings = {"a": 0.1, "b": 0.1, "c": 0.0, "d": 0.0}
    groups = [
        {"params": [model[name].weight for name in names], "weight_decay": settings[names[0]], "lr": 0.01 + 0.1 * index}
        for index, names in enumerate(order)
    ]
    optimizer = AdamW(groups)  # type: ignore[arg-type]
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return AppState(model, optimizer)


def test_optimizer_state_goes_by_name_whatever_the_order_of_groups(tmp_path: Path) -> None:
    saved = _grouped(0, [["a", "b"], ["c", "d"]])
    _save(tmp_path, saved)
    loaded = _load(_grouped(1, [["d", "c"], ["b", "a"]]), tmp_path)
    assert _differing(_whole(loaded), _whole(saved)) == []
    assert [group["weight_decay"] for group in loaded.optimizer.param_groups] == [0.0, 0.1]
    assert [group["lr"] for group in loaded.optimizer.param_groups] == pytest.approx([0.11, 0.01])


def _fail_to_read_on_rank_one(folder: Path) -> str:
    app_state = _app_state(1)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if dist.get_rank() == 1:
        os.preadv = broken  # type: ignore[assignment]
    begun = time.monotonic()
    message = _refusal(app_state, folder)
    assert time.monotonic() - begun < 10
    with pytest.raises(CheckpointError, match="broke off half way"):
        app_state.state_dict()
    return message


def test_what_one_rank_cannot_read_is_told_by_all(tmp_path: Path) -> None:
    run_on_ranks(_train_and_save, 2, tmp_path)
    for message in run_on_ranks(_fail_to_read_on_rank_one, 2, tmp_path):
        assert "Input/output error" in message
        assert "half loaded" in message


def _partly_frozen(seed: int, is_filtered: bool) -> AppState:
    def make(model: nn.Module) -> Optimizer:
        for parameter in model[0].parameters():  # type: ignore[index]
            parameter.requires_grad_(False)
        return AdamW([p for p in model.parameters() if p.requires_grad or not is_filtered])

    return _app_state(seed, make)


def _save_and_load_frozen(folder: Path, is_filtered: bool) -> None:
    saved = _partly_frozen(0, is_filtered)
    _train(saved, 2)
    _save(folder, saved)
    loaded = _load(_partly_frozen(1, is_filtered), folder)
    assert _differing(_whole(loaded), _whole(saved)) == []
    for app_state in (saved, loaded):
        _train(app_state, 1)
    assert _differing(_whole(loaded), _whole(saved)) == []


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("is_filtered", [True, False])
def test_frozen_parameters_are_in_nobodys_way(tmp_path: Path, is_filtered: bool, world_size: int) -> None:
    run_on_ranks(_save_and_load_frozen, world_size, tmp_path, is_filtered)


class Table(nn.Module):
    """A buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.table


class ResettableTable(Table):
    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(3.0))


def _with_table(table: type[Table], device: str) -> nn.Module:
    with torch.device(device):
        return nn.Sequential(nn.Linear(3, 3), table(), nn.BatchNorm1d(3))


def _load_built_on_meta(folder: Path, wrapper: str) -> None:
    eager = _with_table(ResettableTable, "cpu")
    checkpoint = checkpoints_in(folder)[0].path
    if wrapper == "fsdp1":
        loading = FSDP1CheckpointLoading(
            dist.get_rank(), ["Linear"], MixedPrecisionSettings.NO_MIXED_PRECISION, ShardingStrategy.FULL_SHARD
        )
        on_meta = loading.load_model_checkpoint(_with_table(ResettableTable, "meta"), folder / "model.bin")
    else:
        on_meta = TorchCheckpointLoading(torch.device("cpu")).load_model_checkpoint(
            _with_table(ResettableTable, "meta"), checkpoint
        )
    TorchCheckpointLoading(torch.device("cpu")).load_model_checkpoint(eager, checkpoint)
    found = dict(on_meta.named_buffers())
    assert len(found) == 4
    for (name, buffer), expected in zip(found.items(), eager.buffers(), strict=True):
        assert torch.equal(buffer, expected), name
    inputs = torch.ones(2, 3)
    assert torch.equal(on_meta.eval()(inputs), eager.eval()(inputs))


@pytest.mark.parametrize("wrapper", ["fsdp1", "none"])
def test_buffers_of_a_model_built_on_meta_are_those_of_an_eager_one(tmp_path: Path, wrapper: str) -> None:
    model = _with_table(ResettableTable, "cpu")
    _save(tmp_path, AppState(model, SGD(model.parameters())))
    torch.save(model.state_dict(), tmp_path / "model.bin")
    run_on_ranks(_load_built_on_meta, 2, tmp_path, wrapper)


def test_a_buffer_that_nobody_can_compute_is_refused(tmp_path: Path) -> None:
    model = _with_table(Table, "cpu")
    _save(tmp_path, AppState(model, SGD(model.parameters())))
    with pytest.raises(UserError, match=r"1\.table"):
        TorchCheckpointLoading(torch.device("cpu")).load_model_checkpoint(
            _with_table(Table, "meta"), checkpoints_in(tmp_path)[0].path
        )
