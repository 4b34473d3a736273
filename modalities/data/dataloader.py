"""Batches for training (endless) and evaluation (one pass)."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from modalities.data.batch import DatasetBatch
from modalities.data.collators import CollateFnIF
from modalities.data.samplers import ResumableDistributedSampler
from modalities.exceptions import DataError


class LLMDataLoader:
    """Batches of a dataset, in the order of a sampler, made here or in worker processes.

    It never draws from torch's global random state, so that data and dropout do not disturb each other.

    Args:
        dataloader_tag: Name of the data in logs.
        dataset: Where samples come from.
        batch_sampler: Which samples make a batch.
        collate_fn: Makes a batch of samples.
        num_workers: Worker processes; 0 makes batches in this process.
        pin_memory: Whether batches go to page-locked memory; without an accelerator it has no effect.

    Raises:
        DataError: There is not one full batch.
    """

    def __init__(
        self,
        dataloader_tag: str,
        dataset: Dataset[Any],
        batch_sampler: BatchSampler,
        collate_fn: CollateFnIF,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        self.dataloader_tag, self.dataset = dataloader_tag, dataset
        self._batch_sampler, self._collate_fn = batch_sampler, collate_fn
        self._num_workers = num_workers
        self._pin_memory = pin_memory and torch.accelerator.is_available()
        if len(batch_sampler) == 0:
            raise DataError(
                f"data loader {dataloader_tag}: {len(dataset)} samples over all ranks "  # type: ignore[arg-type]
                f"give not one batch of {self.batch_size} per rank; use more data, a smaller batch or a shorter sequence"
            )

    @property
    def batch_size(self) -> int:
        """Samples per batch on this rank."""
        return int(self._batch_sampler.batch_size)

    @property
    def num_replicas(self) -> int:
        """Ranks that the sampler deals samples out to; 1 if each rank gets all."""
        return int(getattr(self._batch_sampler.sampler, "num_replicas", 1))

    @property
    def collate_fn(self) -> CollateFnIF:
        """What makes the batches."""
        return self._collate_fn

    @property
    def masks_targets(self) -> bool:
        """Whether some targets may not count."""
        return self._collate_fn.masks_targets

    def __len__(self) -> int:
        """Batches of one pass on this rank; the same on all ranks."""
        return len(self._batch_sampler)

    def __iter__(self) -> Iterator[DatasetBatch]:
        """One pass."""
        return iter(self._loader(self._batch_sampler))

    def stream(self, num_seen_global_samples: int) -> Iterator[DatasetBatch]:
        """Endless batches of the global order, from a position on.

        Args:
            num_seen_global_samples: Samples that all ranks together have seen.

        Raises:
            DataError: The sampler has no endless order.
        """
        sampler = self._batch_sampler.sampler
        if not isinstance(sampler, ResumableDistributedSampler):
            raise DataError(
                f"data loader {self.dataloader_tag}: training needs `sampler: resumable_distributed_sampler`, "
                f"got {type(sampler).__name__}"
            )
        return iter(self._loader(_batched(sampler.stream(num_seen_global_samples), self.batch_size)))

    def _loader(self, batches: Iterable[list[int]]) -> DataLoader[DatasetBatch]:
        return DataLoader(
            self.dataset,
            batch_sampler=batches,  # type: ignore[arg-type]
            collate_fn=self._collate_fn,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            worker_init_fn=_start_worker if self._num_workers else None,
            generator=torch.Generator().manual_seed(0),
        )


def _batched(indices: Iterator[int], size: int) -> Iterator[list[int]]:
    while batch := list(itertools.islice(indices, size)):
        yield batch


def _start_worker(_worker_id: int) -> None:
    # a signal to stop goes to the whole process group; workers serve until the trainer has saved
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)


def make_batch_sampler(sampler: Any, batch_size: int, drop_last: bool) -> BatchSampler:
    """Builder of ``batch_sampler: default``."""
    return BatchSampler(sampler, batch_size, drop_last)


def make_dataloader(
    dataloader_tag: str,
    dataset: Dataset[Any],
    batch_sampler: BatchSampler,
    collate_fn: CollateFnIF | None,
    num_workers: int,
    pin_memory: bool,
) -> LLMDataLoader:
    """Builder of ``data_loader: default``.

    Raises:
        DataError: No collate function is given.
    """
    if collate_fn is None:
        raise DataError(f"data loader {dataloader_tag} needs a collate_fn, such as gpt_2_llm_collator")
    return LLMDataLoader(dataloader_tag, dataset, batch_sampler, collate_fn, num_workers, pin_memory)
