"""Whatever happens while FSDP1 files are saved, the next start finds a whole checkpoint: the old or the new."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from modalities import durability
from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.checkpoint_saving import CheckpointSaving
from modalities.checkpointing.discovery import checkpoints_in
from modalities.checkpointing.fsdp.fsdp_checkpoint_saving import FSDP1CheckpointSaving
from modalities.checkpointing.reading.loading import verify_together
from modalities.checkpointing.retention import SaveKMostRecentCheckpointsStrategy
from modalities.checkpointing.storage import sweep
from modalities.exceptions import CheckpointError
from modalities.parallel.fsdp1 import shard_model
from modalities.parallel.settings import MixedPrecisionSettings, ShardingStrategy
from modalities.progress import TrainingProgress
from modalities.testing.ranks import RankFailure, run_on_ranks
from tests.checkpointing.faulty_layers import CountingLayer, PowerLossLayer, die

FIRST_STEP = 1
SCENARIOS = {"the next step": FIRST_STEP + 1, "the same step anew": FIRST_STEP}


def _save(folder: Path, step: int, value: float) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    torch.nn.init.constant_(model[0].weight, value)
    precision, strategy = MixedPrecisionSettings.NO_MIXED_PRECISION, ShardingStrategy.FULL_SHARD
    sharded = shard_model(model, True, precision, strategy, ["Linear"])
    app_state = AppState(sharded, torch.optim.AdamW(sharded.parameters()))
    saving = CheckpointSaving(
        SaveKMostRecentCheckpointsStrategy(1), FSDP1CheckpointSaving(folder, "x", dist.get_rank())
    )
    saving.save_now(TrainingProgress(step, 10 * step, 99, 990), app_state)


def _found(folder: Path) -> tuple[int, float]:
    """Step and value of what the next start goes on from."""
    sweep(folder, "x")
    newest = checkpoints_in(folder, "x")[-1]
    verify_together(newest, "full")
    (value,) = torch.load(newest.path, weights_only=True)["0.weight"].unique().tolist()
    assert torch.load(newest.optimizer_path, weights_only=True)["param_groups"]
    return newest.progress.num_seen_steps, value


def _save_and_count(folder: Path, step: int) -> int:
    layer = durability.layer = CountingLayer()
    _save(folder, step, 2.0)
    return layer.num_operations


def _save_and_die(folder: Path, step: int, at: int) -> None:
    durability.layer = CountingLayer(at, die)
    _save(folder, step, 2.0)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_any_operation(tmp_path: Path, scenario: str) -> None:
    step = SCENARIOS[scenario]
    # one rank is enough, since only one writes; several are killed in the soak
    run_on_ranks(_save, 1, tmp_path / "first", FIRST_STEP, 1.0)
    shutil.copytree(tmp_path / "first", tmp_path / "counted")
    total = run_on_ranks(_save_and_count, 1, tmp_path / "counted", step)[0]
    assert total > 30
    seen = set()
    for at in range(1, total + 1):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "first", folder)
        with pytest.raises(RankFailure, match="rank 0 died: exit code 9"):
            run_on_ranks(_save_and_die, 1, folder, step, at)
        found = _found(folder)
        assert found in {(FIRST_STEP, 1.0), (step, 2.0)}, at
        seen.add(found)
        if at % 4 == 0:
            run_on_ranks(_save, 1, folder, step + 1, 4.0)
            assert _found(folder) == (step + 1, 4.0)
            assert len(checkpoints_in(folder)) == 1
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert seen == {(FIRST_STEP, 1.0), (step, 2.0)}


def _fail_everywhere(folder: Path, step: int, number: int) -> list[tuple[int, str | None]]:
    """For each operation of rank 0 what was told when it failed."""
    told: list[tuple[int, str | None]] = []
    rank = dist.get_rank()
    for at in itertools.count(1):
        own = folder / str(at)
        _save(own, FIRST_STEP, 1.0)
        dist.barrier()

        def fail(_: str) -> None:
            raise OSError(number, os.strerror(number), "somewhere")

        layer = CountingLayer(at if rank == 0 else 0, fail)
        durability.layer = layer
        message = None
        try:
            _save(own, step, 2.0)
        except CheckpointError as error:
            message = str(error)
        durability.layer = durability.FileLayer()
        was_reached = [layer.num_operations >= at]
        dist.broadcast_object_list(was_reached, src=0)
        if not was_reached[0]:
            return told
        told.append((at, message))
    return told


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_error_at_any_operation_is_told_by_both_ranks(tmp_path: Path, scenario: str, number: int) -> None:
    step = SCENARIOS[scenario]
    of_zero, of_one = run_on_ranks(_fail_everywhere, 2, tmp_path, step, number)
    assert len(of_zero) > 30
    for (at, message), (_, other) in zip(of_zero, of_one, strict=True):
        found = _found(tmp_path / str(at))
        assert found in {(FIRST_STEP, 1.0), (step, 2.0)}, at
        assert message is not None or found == (step, 2.0), at
        assert (message is None) == (other is None)
        for text in (message, other):
            assert text is None or os.strerror(number) in text.splitlines()[0], (at, text)


def _save_with_images(folder: Path, images: Path, step: int) -> None:
    if dist.get_rank() == 0:
        numbers = itertools.count()

        def look(layer: PowerLossLayer) -> None:
            number = next(numbers)
            for lazy in (True, False):
                layer.image(images / f"{number:04}-{'lazy' if lazy else 'eager'}", lazy=lazy)

        durability.layer = PowerLossLayer(folder, look)
    _save(folder / "checkpoints", step, 2.0)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_power_lost_after_any_operation(tmp_path: Path, scenario: str) -> None:
    step = SCENARIOS[scenario]
    disk, images = tmp_path / "disk", tmp_path / "images"
    run_on_ranks(_save, 2, disk / "checkpoints", FIRST_STEP, 1.0)
    run_on_ranks(_save_with_images, 2, disk, images, step)
    seen = [_found(image / "checkpoints") for image in sorted(images.iterdir())]
    assert len(seen) > 60
    assert set(seen) == {(FIRST_STEP, 1.0), (step, 2.0)}
    assert seen[-2:] == [(step, 2.0)] * 2
