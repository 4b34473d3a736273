"""Every target token counts the same, however a batch is split."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from modalities.training.losses import IGNORE_INDEX, CLMCrossEntropyLoss

LOSS = CLMCrossEntropyLoss("y", "logits")


def test_mean_is_that_of_torch() -> None:
    logits, targets = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(LOSS({"logits": logits}, {"y": targets}), expected)


def test_masked_targets_count_neither_in_the_sum_nor_in_the_number() -> None:
    logits, targets = torch.randn(1, 4, 7), torch.tensor([[3, IGNORE_INDEX, 5, IGNORE_INDEX]])
    assert LOSS.num_targets({"y": targets}).item() == 2
    expected = F.cross_entropy(logits[0, [0, 2]], torch.tensor([3, 5]), reduction="sum")
    torch.testing.assert_close(LOSS.total({"logits": logits}, {"y": targets}), expected)


def test_a_reduced_precision_model_is_judged_in_full_precision() -> None:
    logits, targets = torch.randn(2, 5, 7).bfloat16(), torch.randint(0, 7, (2, 5))
    expected = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
    assert torch.equal(LOSS.total({"logits": logits}, {"y": targets}), expected)
