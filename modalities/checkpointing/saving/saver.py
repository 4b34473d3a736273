"""Saving a sharded state: snapshot, write beside training, commit."""

from __future__ import annotations

import atexit
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.utils import find_state_dict_object

from modalities.checkpointing.saving.agreement import SaveAgreement
from modalities.checkpointing.saving.planning import RankPlan, flatten, make_plan, rendered, signature_of
from modalities.checkpointing.saving.snapshot import Snapshot, fits_in_memory
from modalities.checkpointing.saving.writer import Save, SaveTimes, WrittenState, carry_out, failed
from modalities.checkpointing.storage import Destination
from modalities.exceptions import CheckpointError
from modalities.parallel.bounded import call_within
from modalities.parallel.process_group import fail_together, from_rank_zero, global_rank, machine_device, world_size

logger = logging.getLogger(__name__)

Mode = Literal["async", "sync"]

_GLANCE_S = 0.2
_STORE_S = 1.0
"""The main thread waits no longer for an answer of the job's store: its process may be frozen."""

_savers: weakref.WeakSet[DistributedSaver] = weakref.WeakSet()


@dataclass(frozen=True)
class SavingOptions:
    """How a run saves.

    Args:
        mode: ``async`` writes beside training, from a snapshot; ``sync`` while training waits; None is async where the
            snapshot fits into memory.
        timeout_s: Seconds after which a save has failed.
    """

    mode: Mode | None = "sync"
    timeout_s: float = 1800


class DistributedSaver:
    """Saves the state of a job, each rank its own part, one save at a time.

    All ranks call every method in the same order.

    Args:
        options: How.

    Attributes:
        longest_save_s: Seconds until a checkpoint was committed, at most so far.
        last_times: Of the last save that has ended well.
    """

    def __init__(self, options: SavingOptions) -> None:
        self.options = options
        self.longest_save_s = 0.0
        self.last_times = SaveTimes()
        self.plan: RankPlan | None = None
        self.snapshot: Snapshot | None = None
        self._in_flight: Save | None = None
        self._mode: Mode = "sync"
        self._job_token = ""
        self._store: dist.Store | None = None
        self._num_saves = 0
        _savers.add(self)

    def save(
        self,
        state: Mapping[str, Any],
        rank_part: Any,
        destination_of: Callable[[str], Destination],
        commit: Callable[[WrittenState], None],
        after_commit: Callable[[SaveTimes], None],
    ) -> None:
        """Write the state; returns when it may change again, in sync mode when it is committed.

        Args:
            state: Nested, sharded.
            rank_part: What this rank has for :class:`WrittenState` beside it; small, and not changed any more.
            destination_of: Where to, for the ID of the save.
            commit: What rank 0 does when every rank has written.
            after_commit: What rank 0 does then.

        Raises:
            CheckpointError: This save, in sync mode, or the one before it failed on some rank.
        """
        started = time.perf_counter()
        self.settle()
        flat = flatten(state)
        self._make_ready(state, flat)
        plan = self.plan
        assert plan is not None
        assert self._store is not None
        self._num_saves += 1
        save_id = f"{self._job_token}-{self._num_saves}"
        tensors = [find_state_dict_object(flat, item.index).detach() for item in plan.tensors]
        values = [(index, rendered(flat[index.fqn])) for index in plan.values]
        times = SaveTimes()
        if self._mode == "async":
            copying = time.perf_counter()
            if self.snapshot is None:
                self.snapshot = Snapshot(plan.layout, machine_device())
            self.snapshot.take(tensors)
            tensors = self.snapshot.tensors
            times.snapshot_s = time.perf_counter() - copying
        agreement = SaveAgreement(self._store, save_id, global_rank(), world_size(), self.options.timeout_s)
        snapshot = self.snapshot if self._mode == "async" else None
        save = Save(
            destination_of(save_id),
            agreement,
            plan,
            tensors,
            values,
            rank_part,
            commit,
            after_commit,
            snapshot,
            started,
            times,
        )
        save.thread = threading.Thread(target=carry_out, args=(save,), daemon=True, name="checkpoint-writer")
        self._in_flight = save
        save.thread.start()
        if save.waits:
            self.settle()
        else:
            times.blocked_s = time.perf_counter() - started

    def wait_for_snapshot(self) -> None:
        """Wait until the state may change."""
        if self._in_flight is not None and self._in_flight.snapshot is not None:
            self._in_flight.snapshot.wait()

    @property
    def copies_beside_training(self) -> bool:
        """Whether the last snapshot may still be under way."""
        return self._in_flight is not None and self._in_flight.snapshot is not None and machine_device().type != "cpu"

    @property
    def has_failed(self) -> bool:
        """Whether the save in flight has failed, or ought to have ended by now; costs nothing."""
        save = self._in_flight
        if save is None or save.thread is None:
            return False
        return save.error is not None or (save.thread.is_alive() and save.agreement.is_overdue)

    @property
    def writes_in_this_thread(self) -> bool:
        """Whether it is the writer that asks, which cannot wait for itself."""
        return self._in_flight is not None and self._in_flight.thread is threading.current_thread()

    def settle(self) -> None:
        """Wait for the save in flight, if there is one.

        Raises:
            CheckpointError: It failed, on any rank.
        """
        if self._in_flight is not None:
            self._join(self._in_flight.agreement.seconds_left)
        self._conclude()

    def settle_after_failure(self, patience_s: float) -> None:
        """Wait for the save in flight though the job has failed elsewhere, as long as it can still come about.

        Args:
            patience_s: At most so long.

        Raises:
            CheckpointError: It failed, took too long, or has lost a rank.
        """
        save = self._in_flight
        ends_at = time.monotonic() + patience_s
        while save is not None and not self._join(_GLANCE_S):
            rank = None
            with suppress(RuntimeError, TimeoutError):  # the store has gone, or is frozen: the writer finds that out
                rank = call_within(_STORE_S, save.agreement.gone)
            if rank is not None:
                self._conclude(f"rank {rank}: its process is gone")
            if time.monotonic() > ends_at:
                self._conclude(f"rank {save.agreement.rank}: no answer within {patience_s:g} s")
        self._conclude()

    def _join(self, timeout_s: float) -> bool:
        """Whether the writer has ended."""
        assert self._in_flight is not None
        assert self._in_flight.thread is not None
        self._in_flight.thread.join(timeout_s)
        return not self._in_flight.thread.is_alive()

    def _conclude(self, cause: str | None = None) -> None:
        """Part with the save in flight; one whose writer has not ended has failed."""
        save, self._in_flight = self._in_flight, None
        if save is None or save.thread is None:
            return
        if save.thread.is_alive():
            self.snapshot = None  # a writer that is stuck may still read it
            cause = cause or f"rank {save.agreement.rank}: no answer within {save.agreement.timeout_s:g} s"
            with suppress(RuntimeError, TimeoutError):
                call_within(_STORE_S, partial(save.agreement.tell_failure, cause))
            raise failed(save, cause)
        if save.error is not None:
            raise save.error
        self.last_times = save.times
        self.longest_save_s = max(self.longest_save_s, save.times.write_s + save.times.commit_s)

    def _make_ready(self, state: Mapping[str, Any], flat: Mapping[str, Any]) -> None:
        """Plan, the first time and whenever the state has another form."""
        signature = signature_of(flat)
        if not _on_any_rank(self.plan is None or self.plan.signature != signature):
            return
        self.plan = make_plan(state, signature)
        self.snapshot = None
        self._job_token = self._job_token or from_rank_zero(secrets.token_hex(4))
        self._store = self._store or _store_of_the_job()
        self._mode = self.options.mode or self._mode_that_fits(self.plan)

    def _mode_that_fits(self, plan: RankPlan) -> Mode:
        fits = not _on_any_rank(not fits_in_memory(plan.num_tensor_bytes))
        if not fits and global_rank() == 0:
            size = plan.num_tensor_bytes / 1e9
            logger.warning("a snapshot of %.1f GB a rank does not fit into memory: training waits for each save", size)
        return "async" if fits else "sync"


def _on_any_rank(is_so: bool) -> bool:
    """Whether it is so on some rank; the same answer on all."""
    if world_size() == 1:
        return is_so
    flag = torch.tensor([float(is_so)])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def _store_of_the_job() -> dist.Store:
    """A connection of its own to the store through which the ranks met; one of this process alone without a group."""
    problem: Exception | None = None
    store: dist.Store | None = None
    if not dist.is_initialized():
        return dist.HashStore()
    try:
        store = dist.distributed_c10d._get_default_store()
        if hasattr(store, "clone"):
            store = store.clone()
    except RuntimeError as error:
        problem = CheckpointError(f"the ranks' store cannot be reached: {error}")
    fail_together(problem)
    assert store is not None
    return store


def settle_all() -> None:
    """Wait for every save that this process has in flight.

    Raises:
        CheckpointError: One of them failed, on any rank.
    """
    for saver in list(_savers):
        if not saver.writes_in_this_thread:
            saver.settle()


@atexit.register
def _settle_at_exit() -> None:
    """A program that ends without waiting would leave no checkpoint, and no word of it."""
    for saver in list(_savers):
        try:
            saver.settle()
        except CheckpointError as error:
            logger.error("%s", error)
