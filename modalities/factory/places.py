"""Where a value really stands, seen through interpolations and defaults."""

from __future__ import annotations

from modalities.config.tree import Node, Place


def standing_place(node: Node, holder: Node) -> tuple[Place, list[tuple[str, Place]]]:
    """The place to point a reader at, and the places on the way there as notes.

    A value that an interpolation copied stands where it was copied from. A value that is nobody's, but a default's, is
    told at what it belongs to.

    Args:
        node: The value.
        holder: The component or section that it is a field of.
    """
    chain = [
        (f"used here as `{expression}`", place) for (expression, _), place in zip(node.via, _users(node), strict=True)
    ]
    source = node.via[-1][1] if node.via else node.place
    if _is_somewhere(source):
        return source, [(what, place) for what, place in chain if _is_somewhere(place) and place != source]
    known = [place for _, place in reversed(chain) if _is_somewhere(place)]
    if known:
        return known[0], []
    return holder.best_place, [("its value", source)] if source.origin else []


def _users(node: Node) -> list[Place]:
    """Where each interpolation of the chain is written."""
    return [node.place, *(place for _, place in node.via)][: len(node.via)]


def _is_somewhere(place: Place) -> bool:
    return bool(place.file) or bool(place.origin and not place.origin.startswith("default of "))
