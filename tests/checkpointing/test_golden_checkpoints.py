"""Checkpoints that two ranks wrote in the first format are read by every later version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.discovery import checkpoints_in
from modalities.checkpointing.restoring import restore_
from modalities.checkpointing.resume_state import restore_rng_state
from modalities.progress import TrainingProgress
from modalities.testing.ranks import run_on_ranks

GOLDEN = Path(__file__).parent / "golden"


def _restored(kind: str) -> None:
    model: nn.Module = nn.Linear(3, 2)
    if kind == "fsdp1":
        model = FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif dist.get_world_size() > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    app_state = AppState(model, torch.optim.AdamW(model.parameters(), lr=1.0))
    (checkpoint,) = checkpoints_in(GOLDEN / kind)
    resume_state = restore_(app_state, checkpoint)
    assert resume_state is not None
    assert resume_state.progress == TrainingProgress(1, 64, 8, 512, 4)
    restore_rng_state(resume_state)
    for parameter in filter(torch.numel, model.parameters()):
        state = app_state.optimizer.state[parameter]
        for tensor, value in ((parameter, 0.5), (state["exp_avg"], 0.25), (state["exp_avg_sq"], 0.125)):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            assert bool((local == value).all())
        assert state["step"] == 1
    assert app_state.optimizer.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize(("kind", "world_size"), [("dcp", 1), ("dcp", 2), ("dcp", 3), ("fsdp1", 2)])
def test_a_checkpoint_of_the_first_format_is_read(kind: str, world_size: int) -> None:
    run_on_ranks(_restored, world_size, kind)
