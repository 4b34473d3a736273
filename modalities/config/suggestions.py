"""Nearest names for a word that was not understood."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MUCH_WORSE = 0.2
"""A candidate that is that much less like the word than the best one is not worth a reader's time."""


def nearest(word: object, candidates: Iterable[object], limit: int = 3, cutoff: float = 0.6) -> list[str]:
    """The candidates most like ``word``, best first.

    Args:
        word: What was not understood.
        candidates: What it may have meant.
        limit: How many at most.
        cutoff: Least likeness, from 0 to 1.
    """
    names = list(dict.fromkeys(str(c) for c in candidates))
    by_lower_case = {name.lower(): name for name in names}
    wanted = str(word).lower()
    close = difflib.get_close_matches(wanted, by_lower_case, n=limit, cutoff=cutoff)
    likeness = {name: difflib.SequenceMatcher(None, name, wanted).ratio() for name in close}
    found = [by_lower_case[name] for name in close if likeness[name] >= likeness[close[0]] - _MUCH_WORSE]
    return (found + [n for n in names if str(word) and str(word) in n.split("_") and n not in found])[:limit]


def did_you_mean(word: object, candidates: Iterable[object], what: str) -> str:
    """A hint: the nearest names, or else the first dozen of what there is."""
    names = sorted({str(c) for c in candidates})
    if found := nearest(word, names):
        return "did you mean " + " or ".join(f"`{name}`" for name in found) + "?"
    if not names:
        return f"there are no {what}"
    return f"{what}: {', '.join(names[:12])}{', …' if len(names) > 12 else ''}"
