"""Text generation with a model that training shards, in the midst of training it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from modalities.inference.text_generation import generate_tokens
from modalities.models.gpt2 import GPT2LLM, GPT2Block


def shard(model: GPT2LLM, kind: str, dtype: torch.dtype | None) -> nn.Module:
    if kind == "fsdp1":
        return FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({GPT2Block}),
            mixed_precision=None if dtype is None else MixedPrecision(dtype, dtype, dtype),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    mesh, policy = init_device_mesh("cpu", (2,)), MixedPrecisionPolicy(dtype, dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def check(rank: int, make_model: Callable[..., GPT2LLM], kind: str, dtype: torch.dtype | None, meeting: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    model = shard(make_model(dropout=0.0), kind, dtype)
    for attempt in range(2):
        found = list(generate_tokens(model, [1, 2, 3], 12, temperature=0))
        if dtype is None and attempt == 0:
            assert found == list(generate_tokens(make_model(), [1, 2, 3], 12, temperature=0))
        assert model.training
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters()) or kind == "fsdp1"
        model(torch.ones(1, 8, dtype=torch.long)).float().square().mean().backward()
        assert any(parameter.grad is not None for parameter in model.parameters())
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_a_sharded_model_generates_and_trains_on(make_model, kind, dtype, tmp_path) -> None:
    mp.start_processes(check, args=(make_model, kind, dtype, tmp_path / "meeting"), nprocs=2, start_method="fork")
