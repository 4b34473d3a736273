"""A component of a user's own: masks a part of each sample's targets that differs from sample to sample."""

from __future__ import annotations

from typing import Any

from modalities.data.batch import DatasetBatch
from modalities.data.collators import CollateFnIF, GPT2LLMCollateFn
from modalities.registry.interfaces import CollateFn
from modalities.registry.registry import register


@register("collate_fn", "masks_by_first_token", provides=CollateFn)
class MaskByFirstToken(CollateFnIF):
    """Targets of the first (first token mod 13) positions do not count."""

    def __init__(self, sample_key: str, target_key: str) -> None:
        self.inner = GPT2LLMCollateFn(sample_key, target_key)

    def __call__(self, samples: list[dict[str, Any]]) -> DatasetBatch:
        batch = self.inner(samples)
        targets = batch.targets[self.inner.target_key].clone()
        for row, sample in enumerate(samples):
            targets[row, : int(sample[self.inner.sample_key][0]) % 13] = -100
        return DatasetBatch(batch.samples, {self.inner.target_key: targets})
