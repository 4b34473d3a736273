"""A batch on its way from the data to the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class DatasetBatch:
    """Samples and targets by name; the first axis of each tensor is the batch.

    Args:
        samples: What the model reads.
        targets: What the loss compares with.
    """

    samples: dict[str, Tensor]
    targets: dict[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.samples.values())))

    def to(self, device: torch.device) -> DatasetBatch:
        """The batch on a device; from pinned memory the copy overlaps with computation."""
        return DatasetBatch(
            {name: tensor.to(device, non_blocking=True) for name, tensor in self.samples.items()},
            {name: tensor.to(device, non_blocking=True) for name, tensor in self.targets.items()},
        )

    def pin_memory(self) -> DatasetBatch:
        """The batch in page-locked memory; torch's data loader calls it."""
        return DatasetBatch(
            {name: tensor.pin_memory() for name, tensor in self.samples.items()},
            {name: tensor.pin_memory() for name, tensor in self.targets.items()},
        )
