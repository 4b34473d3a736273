"""Full files of an FSDP1 model and its optimizer go from any wrapping to any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.discovery import checkpoints_in
from modalities.checkpointing.fsdp.fsdp_checkpoint_saving import FSDP1CheckpointSaving
from modalities.checkpointing.restoring import restore_
from modalities.parallel.fsdp1 import full_model_state_dict
from modalities.parallel.parameter_names import clean_name
from modalities.progress import TrainingProgress
from modalities.testing.ranks import run_on_ranks


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)


def _model(how: str) -> FSDP:
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(_Block(), _Block(), nn.Linear(5, 3))
    if "compile" in how:
        model = torch.compile(model, backend="eager")
    policy = ModuleWrapPolicy({_Block})
    wrapped = FSDP(model, device_id=torch.device("cpu"), use_orig_params=True, auto_wrap_policy=policy)
    if "checkpointing" in how:
        apply_activation_checkpointing(wrapped, check_fn=lambda module: isinstance(module, _Block))
    return wrapped


def _step(model: FSDP, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return {clean_name(name): tensor.clone() for name, tensor in full_model_state_dict(model).items()}


def _goes_on(folder: Path, saved: str, loaded: str) -> None:
    model = _model(saved)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _step(model, optimizer)
    saving = FSDP1CheckpointSaving(folder, "run", dist.get_rank())
    saving.save_checkpoint(AppState(model, optimizer), TrainingProgress(1, 1, 1, 1))
    saving.close()
    expected = _step(model, optimizer)
    (checkpoint,) = checkpoints_in(folder)
    stored = torch.load(checkpoint.optimizer_path, weights_only=True)
    assert sorted(stored["state"]) == sorted(clean_name(name) for name, _ in nn.Module.named_parameters(model))
    other = _model(loaded)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.7)
    restore_(AppState(other, other_optimizer), checkpoint)
    got = _step(other, other_optimizer)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


WRAPPINGS = ["plain", "compile", "checkpointing", "compile and checkpointing"]


@pytest.mark.parametrize(
    ("saved", "loaded"), [("plain", how) for how in WRAPPINGS] + [(how, "plain") for how in WRAPPINGS[1:]]
)
def test_the_next_step_is_the_same_however_it_was_wrapped(tmp_path: Path, saved: str, loaded: str) -> None:
    run_on_ranks(_goes_on, 2, tmp_path, saved, loaded)
