"""Precision settings as torch's own objects, and which precision a machine is fast in."""

from __future__ import annotations

import time

import torch
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from modalities.parallel.settings import MixedPrecisionSettings, PyTorchDtypes

_FSDP1_DTYPES: dict[MixedPrecisionSettings, tuple[torch.dtype, torch.dtype, torch.dtype]] = {
    MixedPrecisionSettings.FP_16: (torch.float16, torch.float16, torch.float16),
    MixedPrecisionSettings.BF_16: (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    MixedPrecisionSettings.BF_16_WORKING: (torch.float32, torch.bfloat16, torch.bfloat16),
    MixedPrecisionSettings.FP_32: (torch.float32, torch.float32, torch.float32),
    MixedPrecisionSettings.MIXED_PRECISION_MEGATRON: (torch.bfloat16, torch.float32, torch.float32),
}
"""Type of parameters in computation, of gradient reduction, of buffers."""


def torch_dtype(dtype: PyTorchDtypes) -> torch.dtype:
    """The torch type of that name."""
    found = getattr(torch, dtype.value)
    assert isinstance(found, torch.dtype)
    return found


def fsdp1_mixed_precision(settings: MixedPrecisionSettings) -> MixedPrecision | None:
    """FSDP1's mixed precision; None where everything stays as it is."""
    if settings is MixedPrecisionSettings.NO_MIXED_PRECISION:
        return None
    param_dtype, reduce_dtype, buffer_dtype = _FSDP1_DTYPES[settings]
    return MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype, buffer_dtype=buffer_dtype)


def fsdp2_mixed_precision(param_dtype: PyTorchDtypes, reduce_dtype: PyTorchDtypes) -> MixedPrecisionPolicy:
    """FSDP2's mixed precision for blocks and root alike."""
    return MixedPrecisionPolicy(param_dtype=torch_dtype(param_dtype), reduce_dtype=torch_dtype(reduce_dtype))


def is_fast_in_bfloat16(device: torch.device, size: int = 512) -> bool:
    """Whether a matrix product in bfloat16 beats one in float32 on this device, measured in some 20 ms.

    Processors without bfloat16 instructions emulate it many times slower, which no flag tells.
    """
    if device.type != "cpu":
        return True

    def seconds(dtype: torch.dtype) -> float:
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        matrix @ matrix
        durations = []
        for _ in range(5):
            start = time.perf_counter()
            matrix @ matrix
            durations.append(time.perf_counter() - start)
        return min(durations)

    return seconds(torch.bfloat16) < seconds(torch.float32)
