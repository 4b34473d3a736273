"""Tied weights stay tied, and how many ranks train them makes no difference."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.discovery import checkpoints_in
from modalities.checkpointing.fsdp.fsdp_checkpoint_loading import DCPCheckpointLoading
from modalities.checkpointing.fsdp.fsdp_checkpoint_saving import DCPCheckpointSaving
from modalities.exceptions import UserError
from modalities.models.initialization import initialize_model, make_composed_initialization
from modalities.models.settings import SupportWeightInitModels, WeightInitTypes
from modalities.parallel.fsdp2 import shard_model
from modalities.parallel.settings import PyTorchDtypes
from modalities.progress import TrainingProgress
from modalities.testing.ranks import run_on_ranks
from tests.models.conftest import make_gpt2


def _shard(model: nn.Module, block_names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    precision = SimpleNamespace(param_dtype=PyTorchDtypes.FP_32, reduce_dtype=PyTorchDtypes.FP_32)
    shard_model(model, block_names, precision, True, mesh, 1)


def _app_state(vocab_size: int, seed: int) -> AppState:
    model: nn.Module = make_gpt2(
        vocab_size=vocab_size, use_weight_tying=True, use_meta_device=True, seed=seed, bias=False
    )
    _shard(model, ["GPT2Block"])
    scheme = make_composed_initialization(SupportWeightInitModels.GPT2, WeightInitTypes("scaled"), 0.0, 0.02, None, 2)
    initialize_model(model, scheme)
    return AppState(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def _logits(model: nn.Module, vocab_size: int) -> Tensor:
    logits: Tensor = model({"input_ids": torch.arange(12).view(1, 12) % vocab_size})["logits"]
    return logits


def _assert_tied(model: nn.Module) -> None:
    assert model.transformer["lm_head"].weight is model.transformer["wte"].weight  # type: ignore[index, union-attr]


def _train_save_load(folder: Path, vocab_size: int) -> tuple[dict[str, Tensor], Tensor]:
    """The weights after three steps, and what the loaded model makes of some tokens."""
    app_state, targets = _app_state(vocab_size, 1), torch.arange(1, 13) % vocab_size
    for _ in range(3):
        F.cross_entropy(_logits(app_state.model, vocab_size).flatten(0, 1), targets).backward()
        app_state.optimizer.step()
        app_state.optimizer.zero_grad()
    _assert_tied(app_state.model)
    DCPCheckpointSaving(folder, "x", dist.get_rank()).save_checkpoint(app_state, TrainingProgress(3, 36, 9, 108))
    loaded = _app_state(vocab_size, 2)
    DCPCheckpointLoading(dist.get_rank()).load_checkpoint_(loaded, checkpoints_in(folder)[0].path)
    _assert_tied(loaded.model)
    with torch.no_grad():
        logits = _logits(loaded.model, vocab_size)
        assert torch.equal(logits, _logits(app_state.model, vocab_size))
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in loaded.model.state_dict().items()}
    assert torch.equal(state["transformer.lm_head.weight"], state["transformer.wte.weight"])
    return state, logits


@pytest.mark.parametrize(("vocab_size", "world_size"), [(5, 2), (5, 3), (61, 2)])
def test_ranks_learn_what_one_process_learns(tmp_path: Path, vocab_size: int, world_size: int) -> None:
    ((expected, expected_logits),) = run_on_ranks(_train_save_load, 1, tmp_path / "1", vocab_size)
    for weights, logits in run_on_ranks(_train_save_load, world_size, tmp_path / "several", vocab_size):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-6)


def _refused_sharding() -> str:
    with pytest.raises(UserError) as refusal:
        _shard(make_gpt2(use_weight_tying=True), ["GPT2Block", "Embedding"])
    return str(refusal.value)


def test_block_names_that_part_tied_weights_are_refused() -> None:
    for message in run_on_ranks(_refused_sharding, 2):
        assert "block_names: transformer.lm_head.weight is tied to a weight in Embedding" in message
