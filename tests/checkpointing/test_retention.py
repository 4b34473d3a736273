"""Which checkpoints are written and kept."""

from __future__ import annotations

import pytest

from modalities.checkpointing.retention import SaveEveryKStepsCheckpointingStrategy, SaveKMostRecentCheckpointsStrategy
from modalities.exceptions import UserError
from modalities.progress import TrainingProgress


def _at(*steps: int) -> list[TrainingProgress]:
    return [TrainingProgress(step, step * 10, 100, 1000) for step in steps]


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
    assert strategy.should_save(_at(1)[0])
    assert strategy.to_delete(_at(*saved)) == _at(*deleted)


def test_k_of_zero_saves_nothing() -> None:
    strategy = SaveKMostRecentCheckpointsStrategy(0)
    assert not strategy.should_save(_at(1)[0])
    assert strategy.is_off


def test_every_k_steps_saves_at_multiples_and_keeps_all() -> None:
    strategy = SaveEveryKStepsCheckpointingStrategy(4)
    assert [step for step in range(1, 13) if strategy.should_save(_at(step)[0])] == [4, 8, 12]
    assert strategy.to_delete(_at(4, 8, 12)) == []


@pytest.mark.parametrize(
    ("strategy", "k"), [(SaveKMostRecentCheckpointsStrategy, -2), (SaveEveryKStepsCheckpointingStrategy, 0)]
)
def test_nonsense_is_refused(strategy: type, k: int) -> None:
    with pytest.raises(UserError, match=f"k is {k}"):
        strategy(k)
