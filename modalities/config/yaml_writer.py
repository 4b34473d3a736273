"""Plain values and located trees as YAML text that our loader reads back as the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

from modalities.config.tree import Node
from modalities.config.yaml_loader import IMPLICIT_RESOLVERS

INDENT = 2
_MAX_WIDTH = 120


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper that quotes what our loader would read as a number."""


_Dumper.yaml_implicit_resolvers = IMPLICIT_RESOLVERS


def scalar_text(value: Any) -> str:
    """A scalar, or a flat list or mapping, on one line."""
    if not isinstance(value, str | int | float | bool | None | list | dict):
        value = str(value)
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def tree_text(node: Node, value_of: Callable[[Node], Any], comment_of: Callable[[Node], str] | None = None) -> str:
    """A tree as block-style YAML; lists of scalars stand on one line.

    Args:
        node: The tree; its root is a mapping.
        value_of: What a node is written as: itself, or another value in its place.
        comment_of: Text behind each value, if any.
    """
    if not node.value:
        return "{}\n"
    lines: list[str] = []
    _write(node, value_of, comment_of or (lambda _: ""), "", lines)
    return "\n".join(lines) + "\n"


def _write(
    node: Node, value_of: Callable[[Node], Any], comment_of: Callable[[Node], str], margin: str, lines: list[str]
) -> None:
    items: list[tuple[str, Node]]
    if isinstance(node.value, dict):
        items = [(f"{scalar_text(key)}:", child) for key, child in node.value.items()]
    else:
        items = [("-", child) for child in node.value]
    for head, child in items:
        value = value_of(child)
        if _is_short(child, value, value_of):
            short = _plain(child, value_of) if value is child else value
            comment = comment_of(child)
            lines.append(f"{margin}{head} {scalar_text(short)}" + (f"  # {comment}" if comment else ""))
            continue
        if head != "-":
            comment = comment_of(child)
            lines.append(margin + head + (f"  # {comment}" if comment else ""))
            _write(child, value_of, comment_of, margin + " " * INDENT, lines)
            continue
        first = len(lines)
        _write(child, value_of, comment_of, margin + " " * INDENT, lines)
        lines[first] = f"{margin}- {lines[first][len(margin) + INDENT :]}"


def _is_short(child: Node, value: Any, value_of: Callable[[Node], Any]) -> bool:
    if value is not child or not isinstance(child.value, dict | list):
        return True
    inside = child.value.values() if isinstance(child.value, dict) else child.value
    if not inside:
        return True
    if isinstance(child.value, dict):
        return False
    flat = all(not isinstance(item.value, dict | list) or value_of(item) is not item for item in inside)
    return flat and len(scalar_text(_plain(child, value_of))) < _MAX_WIDTH


def _plain(node: Node, value_of: Callable[[Node], Any]) -> Any:
    value = value_of(node)
    if value is not node:
        return value
    if isinstance(node.value, dict):
        return {key: _plain(child, value_of) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [_plain(child, value_of) for child in node.value]
    return node.value
