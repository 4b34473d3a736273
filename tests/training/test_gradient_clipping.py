"""Norms and clipping over shards are those over the whole model."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor

from modalities.testing.ranks import run_on_ranks
from modalities.training.gradient_clipping import FSDP1GradientClipper, FSDP2GradientClipper
from modalities.training.settings import GradientClippingMode

MAX_NORM = 0.05


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _backward(model: nn.Module) -> None:
    torch.manual_seed(1)
    model(torch.randn(4, 5)).square().sum().backward()


def _expected(mode: GradientClippingMode, max_norm: float | None) -> tuple[float, dict[str, Tensor]]:
    model = _model()
    _backward(model)
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    norm = torch.linalg.vector_norm(gradients, float(mode.value)).item()
    scale = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
    return norm, {name: p.grad * scale for name, p in model.named_parameters() if p.grad is not None}


def _clip_fsdp2(mode: GradientClippingMode, max_norm: float | None) -> tuple[float, dict[str, Tensor]]:
    model = _model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    _backward(model)
    norm = FSDP2GradientClipper(model, mode, max_norm=max_norm).clip_gradients()
    gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if isinstance(p.grad, DTensor)}
    return norm.item(), gradients


def _clip_fsdp1(mode: GradientClippingMode, max_norm: float | None) -> tuple[float, dict[str, Tensor]]:
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear))
    model = FullyShardedDataParallel(
        _model(), auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )
    _backward(model)
    norm = FSDP1GradientClipper(model, mode, max_norm=max_norm).clip_gradients()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        gradients = {
            name.replace("_fsdp_wrapped_module.", ""): p.grad.clone()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
    return norm.item(), gradients


@pytest.mark.parametrize("clip", [_clip_fsdp1, _clip_fsdp2])
@pytest.mark.parametrize("mode", list(GradientClippingMode))
@pytest.mark.parametrize("max_norm", [MAX_NORM, None])
def test_norm_and_gradients_are_those_of_one_process(
    clip: object, mode: GradientClippingMode, max_norm: float | None
) -> None:
    expected_norm, expected = _expected(mode, max_norm)
    assert callable(clip)
    for norm, gradients in run_on_ranks(clip, 2, mode, max_norm):
        assert norm == pytest.approx(expected_norm, rel=1e-5)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)
