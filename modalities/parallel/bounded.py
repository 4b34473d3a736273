"""Calls that may never come back, such as those of a store whose process is frozen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def call_within(seconds: float, work: Callable[[], T]) -> T:
    """What a call gives, if it comes back in time; one that does not goes on in a thread that nobody waits for.

    Raises:
        TimeoutError: It did not come back.
        Exception: What the call raised.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True, name="bounded-call")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]
