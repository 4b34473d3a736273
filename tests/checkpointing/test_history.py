"""Which checkpoints belong to the history that a run is on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from modalities.checkpointing.history import history_of, next_start, starts_of
from modalities.checkpointing.manifest import Start, read_manifest
from modalities.progress import TrainingProgress
from tests.checkpointing.test_manifest import MANIFEST


@dataclass(frozen=True)
class Saved:
    path: Path
    progress: TrainingProgress

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"


def _save(folder: Path, step: int, start: Start | None) -> Saved:
    path = folder / f"{start.number if start else 0}-{step}"
    path.mkdir()
    saved = Saved(path, TrainingProgress(step, step, 999, 999))
    if start is not None:
        saved.manifest_path.write_bytes(replace(MANIFEST, start=start).to_bytes())
    return saved


def _run(folder: Path, origin: Saved | None, steps: list[int], before: list[Saved]) -> list[Saved]:
    """A start that goes on from a checkpoint and saves at these steps."""
    manifest = read_manifest(origin.manifest_path) if origin is not None else None
    start = next_start(
        starts_of(before).values(), manifest, origin.progress.num_seen_steps if origin is not None else 0
    )
    return [_save(folder, step, start) for step in steps]


def _names(checkpoints: object) -> list[str]:
    return [saved.path.name for saved in checkpoints]  # type: ignore[attr-defined]


def test_resuming_the_newest_adds_to_one_history(tmp_path: Path) -> None:
    first = _run(tmp_path, None, [10, 20], [])
    second = _run(tmp_path, first[-1], [30], first)
    history = history_of(starts_of([*first, *second]))
    assert _names(history.current) == ["2-30", "1-20", "1-10"]
    assert history.left == []


def test_going_back_leaves_what_came_after(tmp_path: Path) -> None:
    first = _run(tmp_path, None, [10, 20, 30], [])
    second = _run(tmp_path, first[0], [15], first)
    history = history_of(starts_of([*first, *second]))
    assert _names(history.current) == ["2-15", "1-10"]
    assert _names(history.left) == ["1-30", "1-20"]


def test_going_back_and_forward_again_is_on_the_first_branch(tmp_path: Path) -> None:
    first = _run(tmp_path, None, [20, 40, 60, 88], [])
    second = _run(tmp_path, first[0], [41, 43], first)
    third = _run(tmp_path, first[-1], [100, 126], [*first, *second])
    history = history_of(starts_of([*first, *second, *third]))
    assert _names(history.current) == ["3-126", "3-100", "1-88", "1-60", "1-40", "1-20"]
    assert _names(history.left) == ["2-43", "2-41"]


def test_a_start_that_has_saved_nothing_yet_counts(tmp_path: Path) -> None:
    first = _run(tmp_path, None, [10, 20, 30], [])
    sent_back = Start(2, 10, 1)
    assert _names(history_of(starts_of(first)).current) == ["1-30", "1-20", "1-10"]
    assert _names(history_of(starts_of(first), [Start(1, 0, 0), sent_back]).current) == ["1-10"]
    resumed = next_start([sent_back], read_manifest(first[0].manifest_path), 10)
    assert resumed == Start(3, 10, 1)


def test_numbers_go_on_from_a_copy_elsewhere(tmp_path: Path) -> None:
    copies = _run(tmp_path, None, [60], [])
    copies += _run(tmp_path, copies[-1], [90], copies)
    # the run's own folder is empty
    copies += _run(tmp_path, copies[-1], [100, 200], [])
    assert _names(history_of(starts_of(copies)).current) == ["3-200", "3-100", "2-90", "1-60"]


@pytest.mark.parametrize("step", [10, 90])
def test_what_was_there_before_starts_were_counted_is_gone_on_from(tmp_path: Path, step: int) -> None:
    bare = [_save(tmp_path, 10, None), _save(tmp_path, 90, None)]
    assert _names(history_of(starts_of(bare)).current) == ["0-90", "0-10"]
    origin = bare[0] if step == 10 else bare[1]
    later = _run(tmp_path, origin, [step + 5], bare)
    assert _names(history_of(starts_of([*bare, *later])).current)[-1] == "0-10"
    assert ("0-90" in _names(history_of(starts_of([*bare, *later])).left)) == (step == 10)


def test_without_any_manifest_the_newest_is_gone_on_from(tmp_path: Path) -> None:
    bare = [_save(tmp_path, 10, None), _save(tmp_path, 90, None)]
    assert _names(history_of(starts_of(bare), [Start(1, 0)]).current) == ["0-90", "0-10"]


def test_a_damaged_manifest_is_tried_where_its_step_belongs(tmp_path: Path) -> None:
    first = _run(tmp_path, None, [10, 20, 30], [])
    first[1].manifest_path.write_bytes(b"{")
    assert _names(history_of(starts_of(first)).current) == ["1-30", "1-20", "1-10"]
