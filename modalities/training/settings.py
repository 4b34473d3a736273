"""Names of settings that training components share, free of torch."""

from __future__ import annotations

from enum import Enum


class GradientClippingMode(Enum):
    """Norm that gradients are clipped by."""

    P1_NORM = "1"
    P2_NORM = "2"
    MAX_NORM = "inf"


class Autocast(Enum):
    """Precision of computation for models that no wrapper gives one."""

    NONE = "none"
    BF_16 = "bf16"
    AUTO = "auto"
