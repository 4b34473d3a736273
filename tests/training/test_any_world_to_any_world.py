"""A run goes on in another wrapper and world: the same samples, rates and state; losses up to the order of sums."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.resuming_matrix import LAYOUTS, SETTINGS, Layout, Setting, resume, train

TOLERANCE = 1e-5

CORNER = [
    (Layout("fsdp1", 2), Layout("fsdp1", 4), Setting("adam", True, 1)),
    (Layout("fsdp1", 2), Layout("fsdp2", 2), Setting("adam_w", True, 2)),
    (Layout("fsdp1", 4), Layout("hsdp", 4), Setting("adam_w", False, 1)),
    (Layout("fsdp2", 1), Layout("fsdp2", 4), Setting("adam_w", True, 2)),
    (Layout("fsdp2", 2), Layout("fsdp1", 1), Setting("adam", False, 2)),
    (Layout("fsdp2", 4), Layout("fsdp2", 1), Setting("adam_w", True, 1)),
    (Layout("fsdp2", 2), Layout("fsdp2", 2), Setting("adam", True, 2)),
    (Layout("hsdp", 4), Layout("fsdp2", 2), Setting("adam_w", True, 1)),
    (Layout("hsdp", 4), Layout("hsdp", 4), Setting("adam_w", True, 2)),
]


def _check(before: Layout, after: Layout, setting: Setting, folder: Path) -> None:
    outcome = resume(train(before, setting, folder), after, setting, folder)
    assert outcome.parted_state == ()
    assert outcome.has_same_course
    assert outcome.loss_difference <= (0 if before == after else TOLERANCE)


@pytest.mark.parametrize(("before", "after", "setting"), CORNER, ids=str)
def test_a_run_goes_on_in_another_layout(tmp_path: Path, before: Layout, after: Layout, setting: Setting) -> None:
    _check(before, after, setting, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("before", LAYOUTS, ids=str)
@pytest.mark.parametrize("after", LAYOUTS, ids=str)
def test_every_layout_goes_on_in_every_other(tmp_path: Path, before: Layout, after: Layout, setting: Setting) -> None:
    _check(before, after, setting, tmp_path)
