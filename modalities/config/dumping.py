"""The canonical tree as YAML text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from modalities.config.environment import QUESTIONS
from modalities.config.tree import Node
from modalities.config.yaml_writer import scalar_text, tree_text


def dump_resolved(tree: Node, imports: Sequence[str] = (), comment_of: Callable[[Node], str] | None = None) -> str:
    """The canonical tree as YAML that any safe loader reads and that runs again.

    What belongs to a rank, a machine or one run (``${cuda_env:RANK}``, …) stays a question.

    Args:
        tree: The canonical tree, interpolations answered.
        imports: Modules that the config imports.
        comment_of: Text behind each value, if any.
    """
    head = f"imports: {scalar_text(list(imports))}\n" if imports else ""
    return head + tree_text(tree, value_or_question, comment_of)


def value_or_question(node: Node) -> Any:
    """The node, or the expression that it answers if every rank, machine or run has an answer of its own."""
    if node.via:
        deepest = node.via[-1][0]
        if any("${" + question in deepest for question in QUESTIONS):
            return deepest
    return node
