"""Ending a run early and in good order: signals, and agreement of the ranks on the step to stop at."""

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


class StopRequest:
    """Whether any rank was asked to stop (Ctrl-C, SIGTERM).

    The ranks agree by a reduction that runs beside the step, so that asking costs no waiting.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._asked = torch.zeros(1)
        self._work: Any = None
        self._received_at: float | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within the context the first signal asks to stop; a second Ctrl-C ends the process at once."""
        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for number in previous:
                signal.signal(number, self._receive)
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def begin_agreement(self) -> None:
        """Start asking the other ranks; once per step, on all ranks."""
        if world_size() > 1:
            self._asked.fill_(self.signal_name is not None)
            self._work = dist.all_reduce(self._asked, op=dist.ReduceOp.MAX, async_op=True)

    def is_agreed(self) -> bool:
        """Whether some rank had been asked when the agreement began; the same answer on all ranks."""
        if self._work is None:
            return self.signal_name is not None
        self._work.wait()
        return bool(self._asked[0])

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        # a launcher passes on what the terminal has sent already, so only a later signal is a second one
        if number == signal.SIGINT and self._received_at is not None and time.monotonic() - self._received_at > 1:
            raise KeyboardInterrupt
        self._received_at = self._received_at or time.monotonic()
        self.signal_name = signal.Signals(number).name
