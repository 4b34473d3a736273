"""The located tree: a YAML document in which each value knows who set it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

Key = str | int
TreePath = tuple[Key, ...]

COMPONENT_KEY, VARIANT_KEY, CONFIG = "component_key", "variant_key", "config"
INSTANCE_KEY, PASS_TYPE = "instance_key", "pass_type"


class Sentinel:
    """Marks a value that is absent, or wrong and reported already."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"


BROKEN = Sentinel("broken")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was set: a file's line and column (both from 1), or the origin in words."""

    file: str | None = None
    line: int = 0
    column: int = 0
    origin: str | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.file else self.origin or "<default>"


@dataclass(slots=True, eq=False)
class Node:
    """One value of the tree.

    Args:
        value: ``dict[str, Node]``, ``list[Node]`` or a scalar.
        place: Where the value stands.
        key_place: Where its key stands.
        raw: Text of a plain scalar as written, to explain what YAML made of it.
        via: Interpolations that led here, nearest first, each with the place of its target.
    """

    value: Any
    place: Place
    key_place: Place | None = None
    raw: str | None = None
    via: tuple[tuple[str, Place], ...] = ()

    def plain(self) -> Any:
        """The value as ordinary dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def get(self, path: TreePath) -> Node | None:
        """The node at a path below this one, or None."""
        node: Node = self
        for key in path:
            if isinstance(node.value, dict) and key in node.value:
                node = node.value[key]
            elif isinstance(node.value, list) and isinstance(key, int) and -len(node.value) <= key < len(node.value):
                node = node.value[key]
            else:
                return None
        return node

    def copy(self) -> Node:
        """A copy that shares no mapping and no list with this node."""
        if isinstance(self.value, dict):
            return replace(self, value={key: child.copy() for key, child in self.value.items()})
        if isinstance(self.value, list):
            return replace(self, value=[child.copy() for child in self.value])
        return replace(self)

    def leaves(self, path: TreePath = ()) -> Iterator[tuple[TreePath, Node]]:
        """Every scalar below this node with its path, in file order."""
        if isinstance(self.value, dict):
            for key, child in self.value.items():
                yield from child.leaves((*path, key))
        elif isinstance(self.value, list):
            for index, child in enumerate(self.value):
                yield from child.leaves((*path, index))
        else:
            yield path, self

    @property
    def best_place(self) -> Place:
        """Where to point a reader: the key if there is one, else the value."""
        return self.key_place or self.place


def node_from(value: Any, place: Place) -> Node:
    """Make a tree of ordinary dicts, lists and scalars, all of them set at one place."""
    if isinstance(value, dict):
        return Node({key: node_from(child, place) for key, child in value.items()}, place, place)
    if isinstance(value, list | tuple):
        return Node([node_from(child, place) for child in value], place, place)
    return Node(value, place, place)


def dotted(path: TreePath) -> str:
    """``("model", "config", "n_layer")`` as ``model.config.n_layer``."""
    return ".".join(str(key) for key in path)


def is_component(node: Node) -> bool:
    """Whether a mapping is a component's entry."""
    return isinstance(node.value, dict) and (COMPONENT_KEY in node.value or VARIANT_KEY in node.value)


def reference_name(node: Node) -> Node | None:
    """The node that names the entry referred to, if the mapping is a reference."""
    if isinstance(node.value, dict) and INSTANCE_KEY in node.value and set(node.value) <= {INSTANCE_KEY, PASS_TYPE}:
        name: Node = node.value[INSTANCE_KEY]
        return name
    return None
