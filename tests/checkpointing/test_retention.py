"""Which checkpoints are written and kept."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from modalities.checkpointing.retention import (
    CombinedCheckpointSavingStrategy,
    KeepBestKStrategy,
    KeepEveryNStepsStrategy,
    KeepOnePerPeriodStrategy,
    SavedCheckpoint,
    SaveEveryKStepsCheckpointingStrategy,
    SaveKMostRecentCheckpointsStrategy,
)
from modalities.exceptions import UserError
from modalities.progress import TrainingProgress


def _progress(step: int) -> TrainingProgress:
    return TrainingProgress(step, step * 10, 100, 1000)


def _at(*steps: int) -> list[SavedCheckpoint]:
    return [SavedCheckpoint(_progress(step)) for step in steps]


def _steps(saved: list[SavedCheckpoint]) -> list[int]:
    return [checkpoint.progress.num_seen_steps for checkpoint in saved]


@pytest.mark.parametrize(
    ("k", "saved", "deleted"),
    [
        (-1, (1, 2, 3), ()),
        (2, (9, 10, 100), (9,)),
        (1, (1, 2, 3), (1, 2)),
        (3, (1, 2), ()),
    ],
)
def test_most_recent_keeps_the_last_k(k: int, saved: tuple[int, ...], deleted: tuple[int, ...]) -> None:
    strategy = SaveKMostRecentCheckpointsStrategy(k)
    assert strategy.should_save(_progress(1))
    assert strategy.to_delete(_at(*saved)) == _at(*deleted)


def test_k_of_zero_saves_nothing() -> None:
    strategy = SaveKMostRecentCheckpointsStrategy(0)
    assert not strategy.should_save(_progress(1))
    assert strategy.is_off


def test_every_k_steps_saves_at_multiples_and_keeps_all() -> None:
    strategy = SaveEveryKStepsCheckpointingStrategy(4)
    assert [step for step in range(1, 13) if strategy.should_save(_progress(step))] == [4, 8, 12]
    assert strategy.to_delete(_at(4, 8, 12)) == []


@pytest.mark.parametrize(
    ("strategy", "k"), [(SaveKMostRecentCheckpointsStrategy, -2), (SaveEveryKStepsCheckpointingStrategy, 0)]
)
def test_nonsense_is_refused(strategy: type, k: int) -> None:
    with pytest.raises(UserError, match=f"k is {k}"):
        strategy(k)


def test_milestones_are_kept_for_good() -> None:
    assert _steps(KeepEveryNStepsStrategy(10).to_delete(_at(5, 10, 15, 20, 25))) == [5, 15]


@pytest.mark.parametrize(("best", "deleted"), [("lowest", [1, 2]), ("highest", [2, 3, 4])])
def test_the_best_by_a_metric_are_kept_of_equals_the_newer(best: str, deleted: list[int]) -> None:
    losses = {1: 5.0, 2: 3.0, 3: 1.0, 4: 1.0, 5: 4.0}
    saved = [SavedCheckpoint(_progress(step), metrics={"loss": loss}) for step, loss in losses.items()]
    assert _steps(KeepBestKStrategy(2, "loss", best).to_delete(saved)) == deleted  # type: ignore[arg-type]


def test_a_checkpoint_without_the_metric_or_with_none_that_is_a_number_is_nobody_s_best() -> None:
    measured = [
        SavedCheckpoint(_progress(step), metrics={"loss": loss}) for step, loss in ((2, float("nan")), (4, 9.0))
    ]
    saved = [*_at(1), measured[0], *_at(3), measured[1], *_at(5)]
    assert _steps(KeepBestKStrategy(1, "loss").to_delete(saved)) == [1, 2, 3]


def test_what_was_not_measured_is_kept_until_enough_others_are() -> None:
    saved = [*_at(1, 2, 3), SavedCheckpoint(_progress(4), metrics={"loss": 9.0})]
    assert _steps(KeepBestKStrategy(3, "loss").to_delete(saved)) == [1]
    assert _steps(KeepBestKStrategy(3, "no such").to_delete(saved)) == [1]


def test_the_first_of_each_period_is_kept() -> None:
    times = [datetime(2026, 1, day, hour, tzinfo=UTC) for day, hour in [(1, 0), (1, 12), (2, 1), (2, 2), (3, 0)]]
    saved = [SavedCheckpoint(_progress(step), time) for step, time in enumerate(times, start=1)]
    assert _steps(KeepOnePerPeriodStrategy(24).to_delete(saved)) == [2, 4]


def test_a_combination_saves_when_asked_for_and_keeps_what_any_wants() -> None:
    strategy = CombinedCheckpointSavingStrategy(
        [
            SaveEveryKStepsCheckpointingStrategy(2),
            SaveKMostRecentCheckpointsStrategy(2),
            KeepEveryNStepsStrategy(10),
        ]
    )
    assert [step for step in range(1, 7) if strategy.should_save(_progress(step))] == [2, 4, 6]
    assert _steps(strategy.to_delete(_at(8, 10, 12, 14, 16))) == [8, 12]
    assert strategy.num_kept is None


def test_a_combination_in_which_nobody_chooses_deletes_nothing() -> None:
    assert CombinedCheckpointSavingStrategy([SaveEveryKStepsCheckpointingStrategy(2)]).to_delete(_at(2, 4)) == []


@pytest.mark.parametrize(
    "strategy", [KeepEveryNStepsStrategy(100), KeepBestKStrategy(1, "loss"), SaveKMostRecentCheckpointsStrategy(1)]
)
def test_the_newest_is_never_deleted(strategy: KeepEveryNStepsStrategy) -> None:
    assert 9 not in _steps(strategy.to_delete(_at(3, 6, 9)))
