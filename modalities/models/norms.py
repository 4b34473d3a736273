"""Norms, each by the fields of its config."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from modalities.models.settings import (
    LayerNorms,
    LayerNormWrapper,
    PytorchRMSLayerNormWrapper,
    RMSLayerNormWrapper,
)


class RMSLayerNorm(nn.Module):
    """Root-mean-square norm (https://arxiv.org/abs/1910.07467) with a scale and an optional shift.

    Args:
        ndim: Size of the last dimension.
        epsilon: Added to the mean square.
        bias: Learn a shift.
    """

    def __init__(self, ndim: int, epsilon: float, bias: bool) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(ndim))
        self.bias = nn.Parameter(torch.empty(ndim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scale one, shift zero."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(..., ndim) to (..., ndim); the mean square is taken in fp32."""
        wide = inputs.float()
        scaled = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)).type_as(inputs) * self.weight
        return scaled if self.bias is None else scaled + self.bias


def make_layer_norm(normalized_shape: int, eps: float, elementwise_affine: bool, bias: bool) -> nn.LayerNorm:
    return nn.LayerNorm(normalized_shape, eps=eps, elementwise_affine=elementwise_affine, bias=bias)


def make_pytorch_rms_norm(normalized_shape: int, eps: float) -> nn.RMSNorm:
    return nn.RMSNorm(normalized_shape, eps=eps)


_MAKERS: dict[LayerNorms, Callable[..., nn.Module]] = {
    LayerNorms.rms_norm: RMSLayerNorm,
    LayerNorms.layer_norm: make_layer_norm,
    LayerNorms.pytorch_rms_norm: make_pytorch_rms_norm,
}


def make_norm(wrapper: RMSLayerNormWrapper | LayerNormWrapper | PytorchRMSLayerNormWrapper) -> nn.Module:
    """The norm that a ``LayerNormWrapperConfig`` describes."""
    return _MAKERS[wrapper.norm_type](**dict(wrapper.config))
