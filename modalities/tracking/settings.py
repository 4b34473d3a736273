"""Names of settings of trackers, free of torch."""

from __future__ import annotations

from enum import Enum


class WandbMode(Enum):
    """How Weights & Biases is used."""

    ONLINE = "ONLINE"
    OFFLINE = "OFFLINE"
    DISABLED = "DISABLED"


class ModalitiesProfilerActivity(Enum):
    """What a profiler watches."""

    CPU = "CPU"
    CUDA = "CUDA"
