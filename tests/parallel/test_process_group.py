"""Agreement among ranks: one rank's failure is everyone's."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from modalities.exceptions import CheckpointError, ModalitiesError, UserError
from modalities.parallel.process_group import (
    _told_by_rank_zero,
    fail_together,
    from_rank_zero,
    on_rank_zero,
    process_group,
)
from modalities.testing.ranks import RankFailure, run_on_ranks


def _on_rank_zero(error: Exception | None) -> tuple[str, str]:
    def work() -> str:
        assert dist.get_rank() == 0
        if error is not None:
            raise error
        return "result"

    try:
        return "returned", on_rank_zero(work)
    except Exception as raised:
        return type(raised).__name__, str(raised)


def test_rank_zero_works_for_all() -> None:
    assert run_on_ranks(_on_rank_zero, 2, None) == [("returned", "result")] * 2


def test_its_error_is_everyone_s() -> None:
    outcomes = run_on_ranks(_on_rank_zero, 2, CheckpointError("no space"))
    assert outcomes == [("CheckpointError", "no space"), ("CheckpointError", "rank 0: no space")]
    outcomes = run_on_ranks(_on_rank_zero, 2, ZeroDivisionError("by zero"))
    assert outcomes == [("ZeroDivisionError", "by zero"), ("ModalitiesError", "rank 0: ZeroDivisionError: by zero")]


def _fail_on_rank_one() -> str:
    error = UserError("bad shard") if dist.get_rank() == 1 else None
    with pytest.raises(UserError) as raised:
        fail_together(error)
    fail_together(None)
    return str(raised.value)


def test_any_rank_s_error_is_raised_on_all() -> None:
    assert run_on_ranks(_fail_on_rank_one, 3) == ["rank 1: bad shard", "bad shard", "rank 1: bad shard"]


def test_values_come_from_rank_zero() -> None:
    assert run_on_ranks(_own_rank_from_zero, 2) == [0, 0]


def _own_rank_from_zero() -> int:
    return from_rank_zero(dist.get_rank())


def test_a_single_process_is_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with process_group():
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert (dist.get_world_size(), tensor.item()) == (1, 1.0)
    assert not dist.is_initialized()


def test_an_incomplete_launch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="MASTER_ADDR"), process_group():
        pass


@pytest.mark.parametrize("absent", ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
def test_every_variable_of_the_launcher_is_needed(monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    launched = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (launched | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(absent)
    with pytest.raises(UserError, match=f"the launcher left {absent} unset"), process_group():
        pass


def _who_tells(failing_ranks: list[int]) -> bool:
    told = _told_by_rank_zero(patience_s=1) if dist.get_rank() in failing_ranks else True
    dist.barrier()
    return told


@pytest.mark.parametrize(("failing_ranks", "expected"), [([0, 1], [True, True]), ([1], [True, False])])
def test_a_mistake_of_all_is_told_once_and_one_s_own_by_itself(failing_ranks: list[int], expected: list[bool]) -> None:
    assert run_on_ranks(_who_tells, 2, failing_ranks) == expected


def _die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ModalitiesError):
        fail_together(None)


def test_a_killed_rank_is_noticed_within_seconds() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 died: exit code -9"):
        run_on_ranks(_die_on_rank_one, 2)
    assert time.monotonic() - start < 20
