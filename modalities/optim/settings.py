"""Words of the optimizer and scheduler components; free of torch."""

from __future__ import annotations

from enum import Enum


class AnnealStrategy(Enum):
    """Shape of a one-cycle schedule's rise and fall."""

    COS = "cos"
    LINEAR = "linear"
