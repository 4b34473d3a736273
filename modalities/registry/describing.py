"""Fields in words: their types, bounds and defaults."""

from __future__ import annotations

import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from modalities.registry.fields import DefaultFrom, Slot, bare, is_section

_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_WORDS = {
    int: "int",
    float: "float",
    bool: "true/false",
    str: "text",
    Path: "path",
    type(None): "null",
    Any: "anything",
}


def type_text(annotation: Any) -> str:
    """An annotation as a user would say it: ``float``, ``list of text``, ``a Model``."""
    for marker in getattr(annotation, "__metadata__", ()):
        if isinstance(marker, Slot):
            return f"a {marker.interface.__name__}"
    annotation = bare(annotation)
    if annotation in _WORDS:
        return _WORDS[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_text(argument) for argument in arguments))
    if origin in (list, set):
        return f"list of {type_text(arguments[0])}"
    if origin is tuple:
        return f"list [{', '.join('…' if a is ... else type_text(a) for a in arguments)}]"
    if origin is dict:
        return f"mapping of {type_text(arguments[0])} to {type_text(arguments[1])}"
    if origin is typing.Literal:
        return " | ".join(
            str(argument).lower() if isinstance(argument, bool) else str(argument) for argument in arguments
        )
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(annotation.__members__)
    if is_section(annotation):
        return f"mapping ({', '.join(annotation.model_fields)})"
    return getattr(annotation, "__name__", str(annotation))


def field_type_text(field: FieldInfo) -> str:
    """A field's type with its bounds: ``int, at least 1``."""
    for marker in field.metadata:
        if isinstance(marker, Slot):
            return f"a {marker.interface.__name__}"
    bounds = [
        f"{word} {value:,}" if isinstance(value, int) and value >= 10_000 else f"{word} {value}"
        for marker in field.metadata
        for name, word in _BOUNDS.items()
        if (value := getattr(marker, name, None)) is not None
    ]
    return ", ".join([type_text(field.annotation), *bounds])


def places_of(field: FieldInfo) -> tuple[str, ...]:
    """Where a field's default is looked for in the config."""
    return next((marker.places for marker in field.metadata if isinstance(marker, DefaultFrom)), ())


def default_text(field: FieldInfo) -> str:
    """What holds if a field is not given."""
    places = " or ".join(places_of(field))
    if field.is_required():
        return f"from {places}" if places else "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "required"
    shown = _value_text(default)
    return f"from {places}, else {shown}" if places else shown


def _value_text(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, BaseModel):
        return "its own defaults"
    return str(value)
