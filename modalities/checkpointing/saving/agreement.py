"""How the ranks tell each other how a save goes, beside training: through the job's store, with a deadline.

No collective runs in the background: it would get into the way of those of training, and one frozen rank would hold up
all others for as long as their timeout lasts.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch.distributed as dist

from modalities.exceptions import CheckpointError

_POLL_S = (0.001, 0.05)
_GRACE_S = 0.5
_BEAT_S = 1.0
_GONE_AFTER_S = 5.0
_GONE_FOR_GOOD_AFTER_S = 30.0
"""While nothing else has failed: a process may be held up by a call that lets no other thread run."""


class SaveFailed(CheckpointError):
    """A rank could not do its part; the message names it and the cause."""


class SaveAgreement:
    """What the ranks tell each other about one save.

    Args:
        store: The job's.
        save_id: The same on all ranks, another one for every save.
        rank: Of this process.
        world_size: Number of ranks.
        timeout_s: Seconds from now after which the save has failed.
    """

    def __init__(self, store: dist.Store, save_id: str, rank: int, world_size: int, timeout_s: float) -> None:
        self.store = dist.PrefixStore(f"modalities/save/{save_id}", store)
        self.save_id = save_id
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.deadline = time.monotonic() + timeout_s
        self._last_beats: dict[int, tuple[int, float]] = {}

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Within the context this rank shows that its process lives, however long a write takes."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(_BEAT_S):
                with suppress(RuntimeError):  # the store has gone: the save fails by that, and tells so
                    self.store.add(f"beat/{self.rank}", 1)

        threading.Thread(target=beat, daemon=True, name="checkpoint-heartbeat").start()
        try:
            yield
        finally:
            ended.set()

    def gone(self, after_s: float = _GONE_AFTER_S) -> int | None:
        """A rank that is waited for and whose process has shown no life for so long.

        Rank 0 waits for all that have not written yet, the others wait for rank 0.
        """
        for rank in range(1, self.world_size) if self.rank == 0 else (0,):
            if rank > 0 and self.store.check([f"result/{rank}"]):
                continue
            beats, now = self.store.add(f"beat/{rank}", 0), time.monotonic()
            last, since = self._last_beats.get(rank, (-1, now))
            if beats != last:
                self._last_beats[rank] = (beats, now)
            elif now - since > after_s:
                return rank
        return None

    @property
    def is_overdue(self) -> bool:
        """Whether the deadline, and what rank 0 needs to tell so, have passed."""
        return time.monotonic() > self.deadline + _GRACE_S

    @property
    def seconds_left(self) -> float:
        """Until all must have been told, one way or the other."""
        return max(0.1, self.deadline + 1.5 * _GRACE_S - time.monotonic())

    def tell_written(self, result: Any) -> None:
        """Tell rank 0 that this rank's data is durable."""
        self.store.set(f"result/{self.rank}", cast(str, pickle.dumps(result)))  # its stub knows no bytes
        self.store.add("ended", 1)

    def tell_failure(self, cause: str) -> None:
        """Tell all ranks that the save cannot succeed, and which rank is why; the first to tell is heard."""
        self.store.compare_set("failure", "", cause)
        self.store.add("ended", 1)

    def results(self) -> list[Any]:
        """What every rank told; rank 0 asks.

        Raises:
            SaveFailed: A rank failed, or has told nothing by the deadline.
        """
        self._wait(lambda: self.store.add("ended", 0) >= self.world_size, self.deadline)
        self._raise_failure()
        keys = [f"result/{rank}" for rank in range(self.world_size)]
        results = [pickle.loads(self.store.get(key)) for key in keys]
        for key in keys:
            self.store.delete_key(key)
        return results

    def wait_for_the_others(self, timeout_s: float) -> None:
        """After a failure: give the other ranks time to end their writing."""
        deadline = time.monotonic() + timeout_s
        while self.store.add("ended", 0) < self.world_size and time.monotonic() < deadline:
            time.sleep(_POLL_S[1])

    def tell_committed(self) -> None:
        """Tell all ranks that the checkpoint exists."""
        self.store.set("committed", "1")

    def wait_until_committed(self) -> None:
        """Wait for rank 0.

        Raises:
            SaveFailed: A rank failed, or rank 0 has told nothing by the deadline.
        """
        self._wait(lambda: self.store.check(["committed"]), self.deadline + _GRACE_S)
        if not self.store.check(["committed"]):
            self._raise_failure()

    def _wait(self, done: Any, deadline: float) -> None:
        pause, look_again_at = _POLL_S[0], time.monotonic() + _BEAT_S
        while not done() and not self.store.check(["failure"]):
            if time.monotonic() > look_again_at:
                look_again_at = time.monotonic() + _BEAT_S
                if (rank := self.gone(_GONE_FOR_GOOD_AFTER_S)) is not None:
                    self.store.compare_set("failure", "", f"rank {rank}: its process is gone")
                    return
            if time.monotonic() > deadline:
                absent = [rank for rank in range(self.world_size) if not self.store.check([f"result/{rank}"])]
                who = f"rank {', '.join(map(str, absent))}" if absent else "rank 0"
                self.store.compare_set("failure", "", f"{who}: no answer within {self.timeout_s:g} s")
                return
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])

    def failure(self) -> str | None:
        """The first failure that was told."""
        return self.store.get("failure").decode() if self.store.check(["failure"]) else None

    def _raise_failure(self) -> None:
        if (cause := self.failure()) is not None:
            raise SaveFailed(cause)
