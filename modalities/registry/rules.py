"""Rules over several fields, checked as soon as all of their inputs are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """A condition over several values of a config.

    Args:
        inputs: Dotted paths of the values, below the component's fields or from the config's top; the first is the one
            to blame. A path that ends in ``?`` may be absent, its value is then None.
        check: Takes the values in this order, as the file has them; returns what is wrong, or None.
        severity: ``error``, or ``warning`` for what is odd, but may be meant.
    """

    inputs: tuple[str, ...]
    check: Callable[..., str | None]
    severity: str = "error"
