"""Ending a run early and in good order: signals, time limits, and agreement of the ranks on the step to stop at."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from modalities.parallel.process_group import world_size

_PREEMPTING = ("SIGTERM", "SIGUSR1")
_TIME_LIMIT = "its time limit"


class StopRequest:
    """Whether any rank was asked to stop (Ctrl-C, SIGTERM, SIGUSR1, a time limit), or met a failure beside training.

    The ranks agree by a reduction that runs beside the step, so that asking costs no waiting.

    Args:
        ends_at: When the run must have stopped (``time.monotonic``); None for no limit.

    Attributes:
        seconds_to_save: That the last checkpoint takes once it is asked to stop, as far as is known.
    """

    def __init__(self, ends_at: float | None = None) -> None:
        self.reason: str | None = None
        self._flags = torch.zeros(2)
        self._work: Any = None
        self._received_at: float | None = None
        self.seconds_to_save = 0.0
        self._ends_at = ends_at
        self._longest_round_s = 0.0
        self._round_begun_at: float | None = None

    @property
    def is_preemption(self) -> bool:
        """Whether this rank was asked by a scheduler, or its time limit, rather than by a person."""
        return self.reason in (*_PREEMPTING, _TIME_LIMIT)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within the context the first signal asks to stop; a second Ctrl-C ends the process at once."""
        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        try:
            for number in previous:
                signal.signal(number, self._receive)
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def begin_agreement(self, *, has_failed: bool = False) -> None:
        """Start asking the other ranks; on all ranks, before each step or batch of an evaluation.

        Args:
            has_failed: Whether something has failed on this rank that all ranks must hear of.
        """
        self._watch_the_clock()
        self._flags[0], self._flags[1] = float(self.reason is not None), float(has_failed)
        if world_size() > 1:
            self._work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, async_op=True)

    def is_agreed(self) -> bool:
        """Whether some rank had been asked to stop when the agreement began; the same answer on all ranks."""
        return bool(self._agreed()[0]) or (world_size() == 1 and self.reason is not None)

    def is_failure_agreed(self) -> bool:
        """Whether something had failed on some rank when the agreement began; the same answer on all ranks."""
        return bool(self._agreed()[1])

    def _agreed(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._flags

    def _watch_the_clock(self) -> None:
        """Ask for a stop when another step, as long as the longest so far, and a save would pass the time limit."""
        now = time.monotonic()
        if self._round_begun_at is not None:
            self._longest_round_s = max(self._longest_round_s, now - self._round_begun_at)
        self._round_begun_at = now
        needed = 2 * self._longest_round_s + self.seconds_to_save
        if self._ends_at is not None and self.reason is None and now + needed > self._ends_at:
            self.reason = _TIME_LIMIT

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        # a launcher passes on what the terminal has sent already, so only a later signal is a second one
        if number == signal.SIGINT and self._received_at is not None and time.monotonic() - self._received_at > 1:
            raise KeyboardInterrupt
        self._received_at = self._received_at or time.monotonic()
        self.reason = signal.Signals(number).name
