"""The order in which samples are seen. It depends on the seed alone, never on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset, Sampler

from modalities.data.permutation import shuffled
from modalities.data.settings import ShuffleMethod
from modalities.exceptions import DataError
from modalities.parallel.settings import ParallelismDegrees

_NO_ORDER: Sequence[int] = ()


class ResumableDistributedSampler(Sampler[int]):
    """Deals a global order of samples out to the ranks, card by card.

    The order of an epoch is a permutation seeded with ``seed + epoch``, or 0, 1, 2, … without shuffling.

    Args:
        dataset: What is sampled.
        rank: This rank among ``num_replicas``.
        num_replicas: Ranks that see different samples.
        epoch: Epoch that the order starts with.
        shuffle: Whether the order is random.
        seed: Of the order.
        drop_last: Whether one pass leaves out the tail that cannot be dealt out evenly; else it is filled up from the
            start of the order.
        skip_num_global_samples: Samples of the order that were seen before.
        shuffle_method: How a random order is made.

    Raises:
        DataError: The rank is not one of the replicas, or no sample is left.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        rank: int,
        num_replicas: int,
        epoch: int = 0,
        shuffle: bool | None = False,
        seed: int | None = 0,
        drop_last: bool = True,
        skip_num_global_samples: int = 0,
        shuffle_method: ShuffleMethod = ShuffleMethod.RANDPERM,
    ) -> None:
        if not 0 <= rank < num_replicas:
            raise DataError(f"a sampler's rank must be 0 to {num_replicas - 1} for {num_replicas} replicas, got {rank}")
        self.rank, self.num_replicas = rank, num_replicas
        self.epoch, self.shuffle, self.seed, self.drop_last = epoch, bool(shuffle), seed or 0, drop_last
        self.skip_num_global_samples, self.shuffle_method = skip_num_global_samples, shuffle_method
        self._num_samples = len(dataset)  # type: ignore[arg-type]
        if self._num_samples == 0:
            raise DataError("the dataset has no samples")

    def __iter__(self) -> Iterator[int]:
        """One pass over what is left of the epoch."""
        order = self._order(self.epoch)
        first, end = self.skip_num_global_samples, self._num_samples
        if self.drop_last:
            end -= (end - first) % self.num_replicas
        elif first < end:
            end += -(end - first) % self.num_replicas
        for place in range(first + self.rank, end, self.num_replicas):
            if place >= self._num_samples:
                place = first + (place - first) % (self._num_samples - first)
            yield int(order[place])

    def __len__(self) -> int:
        num_left = max(0, self._num_samples - self.skip_num_global_samples)
        return num_left // self.num_replicas if self.drop_last else -(-num_left // self.num_replicas)

    def stream(self, num_seen_global_samples: int) -> Iterator[int]:
        """The endless order, epoch after epoch, from a global position on; no sample is left out between epochs.

        Args:
            num_seen_global_samples: Samples that all ranks together have seen.
        """
        position = num_seen_global_samples + self.rank
        epoch, order = -1, _NO_ORDER
        while True:
            if position // self._num_samples != epoch:
                epoch = position // self._num_samples
                order = self._order(self.epoch + epoch)
            yield int(order[position % self._num_samples])
            position += self.num_replicas

    def _order(self, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(self._num_samples)
        return shuffled(self._num_samples, self.seed + epoch, self.shuffle_method)


class SequentialSampler(Sampler[int]):
    """0, 1, 2, … on every rank.

    Args:
        data_source: What is sampled.
    """

    def __init__(self, data_source: Dataset[Any]) -> None:
        self._num_samples = len(data_source)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._num_samples))

    def __len__(self) -> int:
        return self._num_samples


def make_distributed_sampler(
    rank: int, num_replicas: int, shuffle: bool, dataset: Dataset[Any], seed: int | None, drop_last: bool
) -> ResumableDistributedSampler:
    """Builder of ``sampler: distributed_sampler``."""
    return ResumableDistributedSampler(dataset, rank, num_replicas, shuffle=shuffle, seed=seed, drop_last=drop_last)


def make_multi_dim_sampler(
    dataset: Dataset[Any],
    device_mesh: DeviceMesh,
    data_parallel_key: ParallelismDegrees,
    epoch: int,
    shuffle: bool | None,
    seed: int | None,
    drop_last: bool,
    skip_num_global_samples: int,
    shuffle_method: ShuffleMethod,
) -> ResumableDistributedSampler:
    """Builder of ``sampler: resumable_distributed_multi_dim_sampler``; rank and replicas are the mesh's.

    Raises:
        DataError: The mesh has no such axis.
    """
    names = device_mesh.mesh_dim_names or ()
    if data_parallel_key.value not in names:
        raise DataError(f"the device mesh has no axis {data_parallel_key.value}; it has {', '.join(names)}")
    axes = [axis for axis in (ParallelismDegrees.DP_REPLICATE.value, data_parallel_key.value) if axis in names]
    rank, num_replicas = 0, 1
    for axis in dict.fromkeys(axes):
        rank = rank * device_mesh[axis].size() + device_mesh[axis].get_local_rank()
        num_replicas *= device_mesh[axis].size()
    return ResumableDistributedSampler(
        dataset, rank, num_replicas, epoch, shuffle, seed, drop_last, skip_num_global_samples, shuffle_method
    )
