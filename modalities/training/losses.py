"""Losses, as sums over tokens, so that any split of a batch gives the same mean."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE_INDEX = -100
"""Target that does not count."""


class Loss(ABC):
    """A loss over predictions and targets.

    Args:
        tag: Name under which it is logged.
    """

    tag: str

    @abstractmethod
    def total(self, predictions: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
        """Sum of the loss over all targets that count, in nats; a scalar."""

    @abstractmethod
    def num_targets(self, targets: dict[str, Tensor]) -> Tensor:
        """How many targets count; a scalar on the targets' device."""

    def __call__(self, predictions: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
        """Mean of the loss over the targets that count."""
        return self.total(predictions, targets) / self.num_targets(targets)


class CLMCrossEntropyLoss(Loss):
    """Cross-entropy of the next token.

    Args:
        target_key: Name of the targets, (B, T) token ids; -100 does not count.
        prediction_key: Name of the predictions, (B, T, V) logits.
        tag: Name under which it is logged.
    """

    def __init__(self, target_key: str, prediction_key: str, tag: str = "CLMCrossEntropyLoss") -> None:
        self.target_key, self.prediction_key, self.tag = target_key, prediction_key, tag

    def total(self, predictions: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
        logits = predictions[self.prediction_key]
        # in float32 whatever the model computes in: a sum over a vocabulary in bfloat16 is off by percents
        return F.cross_entropy(
            logits.flatten(0, -2).float(),
            targets[self.target_key].flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
        )

    def num_targets(self, targets: dict[str, Tensor]) -> Tensor:
        return torch.count_nonzero(targets[self.target_key] != IGNORE_INDEX)
