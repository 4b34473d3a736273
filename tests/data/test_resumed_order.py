"""Whatever the world, the batch, the workers and the stops: the samples seen are those of one unbroken run, in its order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Dataset

from modalities.data.collators import GPT2LLMCollateFn
from modalities.data.dataloader import LLMDataLoader
from modalities.data.permutation import FeistelPermutation, shuffled
from modalities.data.samplers import ResumableDistributedSampler
from modalities.data.settings import ShuffleMethod


class _Numbers(Dataset[dict[str, Any]]):
    """Each sample tells its own index."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.array([index, 0])}


@dataclass(frozen=True)
class _Leg:
    """A part of a run between two stops."""

    world_size: int
    micro_batch_size: int
    num_micro_batches: int
    num_steps: int

    @property
    def num_samples(self) -> int:
        return self.world_size * self.micro_batch_size * self.num_micro_batches * self.num_steps


legs = st.builds(
    _Leg,
    world_size=st.sampled_from([1, 2, 3, 4, 8]),
    micro_batch_size=st.integers(1, 4),
    num_micro_batches=st.integers(1, 3),
    num_steps=st.integers(0, 4),
)


def _seen(dataset: _Numbers, leg: _Leg, position: int, num_workers: int, **fields: Any) -> list[int]:
    """What all ranks see in a leg that starts at a position, in the global order."""
    of_rank = []
    for rank in range(leg.world_size):
        sampler = ResumableDistributedSampler(dataset, rank, leg.world_size, **fields)
        batches = BatchSampler(sampler, leg.micro_batch_size, drop_last=True)
        loader = LLMDataLoader("train", dataset, batches, GPT2LLMCollateFn("x", "y"), num_workers, pin_memory=False)
        stream = loader.stream(position)
        taken = itertools.islice(stream, leg.num_micro_batches * leg.num_steps)
        of_rank.append([row for batch in taken for row in batch.samples["x"][:, 0].tolist()])
    return [sample for dealt in zip(*of_rank, strict=True) for sample in dealt]


def _check(num_samples: int, parts: list[_Leg], num_workers: int, **fields: Any) -> None:
    # every rank needs a batch of one pass for its loader to be there at all
    dataset = _Numbers(max(num_samples, *(leg.world_size * leg.micro_batch_size for leg in parts)))
    seen: list[int] = []
    for leg in parts:
        seen += _seen(dataset, leg, len(seen), num_workers, **fields)
    assert len(seen) == sum(leg.num_samples for leg in parts)
    unbroken = ResumableDistributedSampler(dataset, 0, 1, **fields).stream(0)
    assert seen == list(itertools.islice(unbroken, len(seen)))
    for start in range(0, len(seen) - len(dataset) + 1, len(dataset)):
        assert sorted(seen[start : start + len(dataset)]) == list(range(len(dataset)))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    num_samples=st.integers(1, 60),
    parts=st.lists(legs, min_size=1, max_size=4),
    seed=st.integers(0, 2**62 - 1),
    shuffle=st.booleans(),
    shuffle_method=st.sampled_from(ShuffleMethod),
)
def test_none_is_lost_none_seen_twice_and_the_order_is_kept(num_samples: int, parts: list[_Leg], **fields: Any) -> None:
    _check(num_samples, parts, 0, **fields)


@pytest.mark.parametrize("method", ShuffleMethod)
def test_what_workers_have_fetched_ahead_is_not_lost(method: ShuffleMethod) -> None:
    parts = [_Leg(2, 2, 2, 3), _Leg(1, 4, 1, 2), _Leg(4, 1, 1, 3)]
    _check(17, parts, 2, shuffle=True, seed=7, shuffle_method=method)


@settings(max_examples=200, deadline=None)
@given(num_samples=st.integers(1, 3000), seed=st.integers(-5, 2**64))
def test_a_computed_order_is_a_permutation(num_samples: int, seed: int) -> None:
    order = FeistelPermutation(num_samples, seed)
    assert sorted(order) == list(range(num_samples))
    assert order[1:4] == [order[place] for place in range(*slice(1, 4).indices(num_samples))]


def test_a_computed_order_looks_random_and_never_changes() -> None:
    order = list(FeistelPermutation(10_000, 1))
    # pinned: a run that was started with it must go on with it
    assert order[:5] == [3345, 8695, 1959, 7469, 4651]
    steps = np.diff(order)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(order, range(10_000))[0, 1]) < 0.03
    assert len(set(steps.tolist())) > 6000
    fixed = sum(place == sample for place, sample in enumerate(order))
    assert fixed < 8
    assert order != list(FeistelPermutation(10_000, 2))
    with pytest.raises(IndexError):
        FeistelPermutation(10_000, 1)[10_000]


def test_orders_of_a_billion_are_at_hand_without_being_made() -> None:
    size = 10**9
    for fields in ({"shuffle": False}, {"shuffle": True, "shuffle_method": ShuffleMethod.FEISTEL}):
        sampler = ResumableDistributedSampler(_Numbers(size), 1, 4, **fields)
        assert 0 <= next(sampler.stream(size - 5)) < size
        one_pass = iter(sampler)
        assert len(set(itertools.islice(one_pass, 1000))) == 1000


def test_the_drawn_order_is_that_of_existing_runs() -> None:
    expected = torch.randperm(50, generator=torch.Generator().manual_seed(3)).tolist()
    assert [int(sample) for sample in shuffled(50, 3, ShuffleMethod.RANDPERM)] == expected
