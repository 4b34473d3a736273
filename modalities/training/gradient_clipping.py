"""Gradient norms and clipping, over sharded and unsharded models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from modalities.training.settings import GradientClippingMode


class GradientClipperIF(ABC):
    """Clips the gradients of one model."""

    @abstractmethod
    def clip_gradients(self) -> Tensor:
        """Clip, if that is its job.

        Returns:
            The global norm before clipping, a scalar; no host copy is made.
        """


class FSDP1GradientClipper(GradientClipperIF):
    """Clips the gradients of an FSDP1 model.

    Args:
        wrapped_model: The model.
        norm_type: Which norm.
        max_norm: Gradients are scaled down to this norm; None only measures.
    """

    def __init__(
        self, wrapped_model: nn.Module, norm_type: GradientClippingMode, max_norm: float | None = None
    ) -> None:
        self.wrapped_model = wrapped_model
        self.norm_type = float(norm_type.value)
        self.max_norm = float("inf") if max_norm is None else max_norm

    def clip_gradients(self) -> Tensor:
        if isinstance(self.wrapped_model, FSDP):
            return self.wrapped_model.clip_grad_norm_(self.max_norm, self.norm_type)
        return _clip(self.wrapped_model.parameters(), self.max_norm, self.norm_type)


class FSDP2GradientClipper(GradientClipperIF):
    """Clips the gradients of an FSDP2 or unsharded model.

    Args:
        model_parts: The model, or its parts, whose norm is taken together.
        norm_type: Which norm.
        device_mesh: The mesh the model is sharded over.
        max_norm: Gradients are scaled down to this norm; None only measures.
    """

    def __init__(
        self,
        model_parts: nn.Module | list[nn.Module],
        norm_type: GradientClippingMode,
        device_mesh: DeviceMesh | None = None,
        max_norm: float | None = None,
    ) -> None:
        self.model_parts = model_parts if isinstance(model_parts, list) else [model_parts]
        self.norm_type = float(norm_type.value)
        self.device_mesh = device_mesh
        self.max_norm = float("inf") if max_norm is None else max_norm

    def clip_gradients(self) -> Tensor:
        parameters = [parameter for part in self.model_parts for parameter in part.parameters()]
        return _clip(parameters, self.max_norm, self.norm_type)


def measuring_only(model_parts: list[nn.Module]) -> GradientClipperIF:
    """What a run without a gradient clipper has: the norm is logged, gradients are left alone."""
    if len(model_parts) == 1 and isinstance(model_parts[0], FSDP):
        return FSDP1GradientClipper(model_parts[0], GradientClippingMode.P2_NORM)
    return FSDP2GradientClipper(model_parts, GradientClippingMode.P2_NORM)


def _clip(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float) -> Tensor:
    with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in with_gradients if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients, norm_type)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm != float("inf"):
        nn.utils.clip_grads_with_norm_(with_gradients, max_norm, norm)
    return norm.to(torch.float32)
