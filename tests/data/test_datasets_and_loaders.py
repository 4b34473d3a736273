"""Blocks, their order, and the loaders that batch them."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler

from modalities.data.collators import GPT2LLMCollateFn
from modalities.data.dataloader import LLMDataLoader
from modalities.data.packed_dataset import PackedMemMapDatasetContinuous
from modalities.data.packed_file import info_path
from modalities.data.samplers import ResumableDistributedSampler, SequentialSampler
from modalities.exceptions import DataError
from modalities.testing.tiny import write_tokens

NUM_SAMPLES = 11


@pytest.fixture
def dataset(tmp_path: Path) -> PackedMemMapDatasetContinuous:
    return PackedMemMapDatasetContinuous(write_tokens(tmp_path / "data.pbin", 4 * NUM_SAMPLES + 1, 50), 4, "x")


@pytest.mark.parametrize(("reuse", "starts"), [(True, [0, 4, 8]), (False, [0, 5, 10])])
def test_blocks(tmp_path: Path, reuse: bool, starts: list[int]) -> None:
    path = write_tokens(tmp_path / "data.pbin", 15, 50)
    dataset = PackedMemMapDatasetContinuous(path, 4, "x", reuse)
    tokens = dataset._tokens.tolist()
    assert [block["x"].tolist() for block in (dataset[i] for i in range(len(dataset)))] == [
        tokens[start : start + 5] for start in starts
    ]
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_every_token_but_the_first_is_a_target_once(dataset: PackedMemMapDatasetContinuous) -> None:
    targets = [token for i in range(len(dataset)) for token in dataset[i]["x"][1:].tolist()]
    assert targets == dataset._tokens[1:].tolist()


def test_a_file_shorter_than_a_sample_is_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 16 tokens, fewer than one sample of 17"):
        PackedMemMapDatasetContinuous(write_tokens(tmp_path / "data.pbin", 16, 50), 16, "x")


def test_ids_beyond_a_model_s_vocabulary_are_told(dataset: PackedMemMapDatasetContinuous) -> None:
    largest = int(dataset._tokens.max())
    dataset.require_token_ids_below(largest + 1)
    with pytest.raises(DataError, match=f"token id {largest}, but the model's vocabulary has {largest} ids"):
        dataset.require_token_ids_below(largest)


def test_of_a_very_large_file_each_sample_is_checked(
    dataset: PackedMemMapDatasetContinuous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modalities.data.packed_dataset._FULL_SCAN_LIMIT", 3)
    assert not info_path(dataset.path).exists()
    dataset.require_token_ids_below(1)
    with pytest.raises(DataError, match="vocabulary has 1 ids"):
        dataset[0]


def test_a_worker_maps_the_file_itself(dataset: PackedMemMapDatasetContinuous) -> None:
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(pickle.dumps(dataset)) < 1000
    assert copy[3]["x"].tolist() == dataset[3]["x"].tolist()


def _order(epoch: int) -> list[int]:
    return torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(5 + epoch)).tolist()


def _sampler(dataset: Any, rank: int = 0, num_replicas: int = 1, **fields: Any) -> ResumableDistributedSampler:
    return ResumableDistributedSampler(dataset, rank, num_replicas, shuffle=True, seed=5, **fields)


def test_one_pass_is_the_documented_order(dataset: PackedMemMapDatasetContinuous) -> None:
    assert list(_sampler(dataset)) == _order(0)
    assert list(_sampler(dataset, epoch=2)) == _order(2)
    assert list(_sampler(dataset, skip_num_global_samples=4)) == _order(0)[4:]
    assert list(_sampler(dataset, 1, 2)) == _order(0)[:10][1::2]
    assert list(_sampler(dataset, 1, 2, drop_last=False)) == [*_order(0), _order(0)[0]][1::2]
    for ranks in (1, 2, 3):
        for rank in range(ranks):
            sampler = _sampler(dataset, rank, ranks, skip_num_global_samples=3)
            assert len(sampler) == len(list(sampler)) == 8 // ranks


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_the_stream_is_the_epochs_in_a_row_whatever_the_world(dataset: Any, num_replicas: int) -> None:
    expected = _order(0) + _order(1) + _order(2)
    streams = [_sampler(dataset, rank, num_replicas).stream(0) for rank in range(num_replicas)]
    dealt = [next(stream) for _ in range(32 // num_replicas) for stream in streams]
    assert dealt == expected[:32]


@pytest.mark.parametrize("position", range(2 * NUM_SAMPLES + 2))
def test_a_stream_from_any_position_is_the_tail_of_the_whole(dataset: Any, position: int) -> None:
    whole = list(itertools.islice(_sampler(dataset).stream(0), position + 15))
    assert list(itertools.islice(_sampler(dataset).stream(position), 15)) == whole[position:]


def test_a_position_far_away_is_reached_at_once(dataset: Any) -> None:
    assert next(_sampler(dataset).stream(NUM_SAMPLES * 10**9)) == _order(10**9)[0]


def test_a_rank_beyond_the_replicas_is_refused(dataset: Any) -> None:
    with pytest.raises(DataError, match="must be 0 to 1 for 2 replicas, got 2"):
        _sampler(dataset, 2, 2)


def _loader(dataset: Any, num_workers: int = 0, batch_size: int = 3, sampler: Any = None) -> LLMDataLoader:
    batches = BatchSampler(sampler or _sampler(dataset), batch_size, drop_last=True)
    return LLMDataLoader("train", dataset, batches, GPT2LLMCollateFn("x", "y"), num_workers, pin_memory=True)


def test_inputs_and_targets_are_shifted_by_one(dataset: PackedMemMapDatasetContinuous) -> None:
    batch = next(iter(_loader(dataset)))
    assert len(batch) == 3
    for row, index in enumerate(_order(0)[:3]):
        assert batch.samples["x"][row].tolist() == dataset[index]["x"][:-1].tolist()
        assert batch.targets["y"][row].tolist() == dataset[index]["x"][1:].tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("position", [0, 9, 12])
def test_a_stream_of_batches_crosses_epochs_in_order(dataset: Any, num_workers: int, position: int) -> None:
    order = (_order(0) + _order(1) + _order(2) + _order(3))[position:]
    batches = list(itertools.islice(_loader(dataset, num_workers).stream(position), 7))
    expected = [dataset[index]["x"][:-1].tolist() for index in order[:21]]
    assert [row for batch in batches for row in batch.samples["x"].tolist()] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loading_draws_nothing_from_the_global_random_state(dataset: Any, num_workers: int) -> None:
    before = torch.get_rng_state()
    loader = _loader(dataset, num_workers)
    list(loader)
    next(loader.stream(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_training_needs_an_endless_order(dataset: Any) -> None:
    with pytest.raises(DataError, match="resumable_distributed_sampler"):
        next(_loader(dataset, sampler=SequentialSampler(dataset)).stream(0))


def test_less_than_one_batch_is_refused_with_numbers(dataset: Any) -> None:
    with pytest.raises(DataError, match=r"11 samples .* not one batch of 12"):
        _loader(dataset, batch_size=12)
