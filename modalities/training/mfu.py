"""Model FLOPs utilisation: what part of the hardware's peak the model's arithmetic uses."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

_PEAK_FLOPS_16_BIT = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12}
"""Dense 16-bit peaks in FLOP/s, from the vendors' data sheets."""


class MFUCalculatorIF(ABC):
    """Turns a sample rate into MFU."""

    @abstractmethod
    def compute(self, num_samples_per_second: float) -> float:
        """MFU of the whole job in [0, 1], or -1 where the hardware's peak is unknown."""


class GPT2MFUCalculator(MFUCalculatorIF):
    """MFU of a GPT, with 6 N + 12 L D T FLOPs per token (PaLM, arXiv:2204.02311, appendix B).

    Args:
        n_layer: Number of blocks L.
        sequence_length: Tokens per sample T.
        n_embd: Width D.
        world_size: Number of ranks.
        model_parts: The model, or its parts; N is the number of their parameters.
    """

    def __init__(
        self,
        n_layer: int,
        sequence_length: int,
        n_embd: int,
        world_size: int,
        model_parts: nn.Module | list[nn.Module],
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        parts = model_parts if isinstance(model_parts, list) else [model_parts]
        num_parameters = sum(parameter.numel() for part in parts for parameter in part.parameters())
        self.flops_per_sample = sequence_length * (6 * num_parameters + 12 * n_layer * n_embd * sequence_length)
        self.device_mesh = device_mesh
        peak = _peak_flops()
        self.peak_flops = None if peak is None else peak * world_size

    def compute(self, num_samples_per_second: float) -> float:
        if self.peak_flops is None:
            return -1.0
        return self.flops_per_sample * num_samples_per_second / self.peak_flops


def _peak_flops() -> float | None:
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    fitting = [key for key in _PEAK_FLOPS_16_BIT if key in name]
    return _PEAK_FLOPS_16_BIT[max(fitting, key=len)] if fitting else None
