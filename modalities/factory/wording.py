"""What is wrong with a value, in words, and what to do about it."""

from __future__ import annotations

import types
import typing
from typing import Any

from modalities.config.suggestions import did_you_mean
from modalities.config.tree import Node
from modalities.registry.fields import bare

_NEEDS = {
    ("int_type", "int_parsing", "int_from_float", "int_parsing_size"): "needs a whole number (int)",
    ("float_type", "float_parsing"): "needs a number (float)",
    ("bool_type", "bool_parsing"): "needs true or false (bool)",
    ("string_type",): "needs a text",
    ("path_type",): "needs a path",
    ("list_type", "set_type", "iterable_type"): "needs a list",
    ("dict_type", "model_type", "model_attributes_type", "mapping_type", "dataclass_type"): "needs a mapping of fields",
    ("none_required",): "needs null",
}
_WORDS = {kind: words for kinds, words in _NEEDS.items() for kind in kinds}
_BOUNDS = {
    "greater_than": ("gt", "must be above {}"),
    "greater_than_equal": ("ge", "must be at least {}"),
    "less_than": ("lt", "must be below {}"),
    "less_than_equal": ("le", "must be at most {}"),
}

SCALARS: dict[type, str] = {int: "a whole number (int)", float: "a number (float)", bool: "true or false (bool)"}
"""Scalars that a YAML value must be of, and is not bent to."""


def needed_scalar(wanted: set[type]) -> str:
    """``needs a number (float)``; a float takes whole numbers too, which goes without saying."""
    names = sorted(SCALARS[kind] for kind in wanted if kind is not int or float not in wanted)
    return f"needs {' or '.join(names)}"


def complaint_text(complaint: Any, annotation: Any) -> str:
    """Pydantic's complaint about one value, as a sentence about what the value must be."""
    kind, context = complaint["type"], complaint.get("ctx", {})
    if kind in _WORDS:
        return _WORDS[kind]
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return words.format(context[name])
    if kind in ("tuple_type", "too_long", "too_short") and (length := _tuple_length(annotation)) is not None:
        return f"needs a list of {length} values"
    if kind in ("too_long", "too_short"):
        bound = f"at most {context['max_length']}" if kind == "too_long" else f"at least {context['min_length']}"
        return f"needs {bound} values"
    if kind == "tuple_type":
        return "needs a list"
    if kind == "finite_number":
        return "must be a finite number"
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "literal_error":
        return f"must be {str(context.get('expected', '')).replace('True', 'true').replace('False', 'false')}"
    text = str(complaint["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return text[:1].lower() + text[1:]


def got(value: Any, node: Node) -> str:
    """What stands there instead, as written."""
    if isinstance(value, bool):
        return f"`{node.raw or str(value).lower()}`, a truth value"
    if isinstance(value, str):
        return f'the text "{value}"'
    if isinstance(value, int | float):
        return f"`{node.raw or value}`"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "1 value" if len(value) == 1 else f"{len(value)} values"
    return "nothing" if value is None else f"`{value}`"


def hints_for(complaint: Any, value: Any, node: Node) -> list[str]:
    """What to do about a wrong value."""
    hints = scalar_hints(value, node)
    context = complaint.get("ctx", {})
    allowed = context.get("allowed") or context.get("expected")
    if isinstance(value, str) and isinstance(allowed, str):
        words = [word.strip("' ") for word in allowed.replace(" or ", ",").split(",")]
        hints.append(did_you_mean(value, words, "allowed"))
    if complaint["type"] == "path_not_found":
        hints.append("relative paths start at the folder in which the command runs")
    return hints


def scalar_hints(value: Any, node: Node) -> list[str]:
    """How YAML came to read the value as it did."""
    if isinstance(value, bool):
        raw = node.raw or ""
        if raw.lower() not in ("true", "false", ""):
            return [f'YAML 1.1 reads a bare `{raw}` as {str(value).lower()}: write "{raw}" for the text']
    elif isinstance(value, str) and node.place.file and _is_number(value):
        if node.raw is not None:
            return [f"YAML 1.1 takes `{node.raw}` for a text: write {value.lstrip('0') or 0} for the number"]
        return ["leave out the quotes"]
    return []


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _tuple_length(annotation: Any) -> int | None:
    annotation = bare(annotation)
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple and ... not in arguments:
        return len(arguments)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next((n for a in arguments if (n := _tuple_length(a)) is not None), None)
    return None
