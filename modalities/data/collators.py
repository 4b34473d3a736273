"""From samples to batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from modalities.data.batch import DatasetBatch


class CollateFnIF(ABC):
    """Makes a batch of samples."""

    masks_targets: bool = True
    """Whether some targets may not count; if not, counting them is spared."""

    @abstractmethod
    def __call__(self, samples: list[dict[str, NDArray[Any]]]) -> DatasetBatch:
        """The batch."""


class GPT2LLMCollateFn(CollateFnIF):
    """Inputs are all tokens but the last, targets all but the first.

    Args:
        sample_key: Name of the token ids, (T + 1,) in a sample and (B, T) in the batch.
        target_key: Name of the targets, (B, T).
    """

    masks_targets = False

    def __init__(self, sample_key: str, target_key: str) -> None:
        self.sample_key, self.target_key = sample_key, target_key

    def __call__(self, samples: list[dict[str, NDArray[Any]]]) -> DatasetBatch:
        token_ids = torch.from_numpy(np.stack([sample[self.sample_key] for sample in samples]))
        return DatasetBatch({self.sample_key: token_ids[:, :-1]}, {self.target_key: token_ids[:, 1:]})
