"""A JSON schema of configs, so that editors complete component names and fields.

It is looser than `modalities check`: a reference or an interpolation may stand for anything.
"""

from __future__ import annotations

import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from modalities.composition.schema import Schema
from modalities.config.tree import COMPONENT_KEY, CONFIG, INSTANCE_KEY, PASS_TYPE, VARIANT_KEY
from modalities.registry.describing import default_text
from modalities.registry.fields import annotations_of, bare, is_section, names_of, slots_of
from modalities.registry.interfaces import Anything, IntValue
from modalities.registry.spec import Spec

_QUESTION = {"$ref": "#/$defs/question"}
_REFERENCE = {"$ref": "#/$defs/reference"}
_COMPONENT = {"$ref": "#/$defs/component"}
_COMPUTED = {"$ref": "#/$defs/computed"}
_OPEN = {"const": "???"}
_OVERLAY = {"$ref": "#/$defs/overlay"}


def json_schema(schema: Schema) -> dict[str, Any]:
    """The schema of the files that the recipe reads, for draft 7, which editors know."""
    definitions: dict[str, Any] = {
        "question": {"type": "string", "pattern": r"\$\{", "title": "interpolation"},
        "reference": {
            "title": "reference",
            "type": "object",
            "properties": {INSTANCE_KEY: {"type": "string"}, PASS_TYPE: {"enum": ["BY_REFERENCE", "BY_VALUE"]}},
            "required": [INSTANCE_KEY],
            "additionalProperties": False,
        },
        "overlay": {
            "title": "fields over those of a group",
            "type": "object",
            "not": {"required": [VARIANT_KEY]},
        },
        "computed": {
            "title": "a number that a component computes",
            "anyOf": [{"$ref": f"#/$defs/{_key(spec)}"} for spec in schema.registry if spec.provides is IntValue],
        },
        "component": {
            "title": "component",
            "type": "object",
            "properties": {
                COMPONENT_KEY: {"enum": schema.registry.kinds()},
                VARIANT_KEY: {"type": "string"},
            },
            "required": [COMPONENT_KEY, VARIANT_KEY],
        },
    }
    for spec in schema.registry:
        definitions |= _spec_schemas(spec, schema)
    properties: dict[str, Any] = {
        "defaults": {"type": "array", "description": "groups and configs that this one builds on"},
        "imports": {"description": "modules that register components", "type": ["array", "string"]},
        "user": {"description": "anything of your own; nothing reads it"},
    }
    for name, field in schema.recipe.model_fields.items():
        annotation = annotations_of(schema.recipe)[name]
        properties[name] = {**_any_of(annotation, schema), "description": field.description or ""}
    for name in getattr(schema.recipe, "shared", {}):
        properties[name] = _any_of(annotations_of(schema.recipe)[name], schema)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "modalities",
        "type": "object",
        "properties": properties,
        "additionalProperties": {"anyOf": [_COMPONENT, {}]},
        "$defs": definitions,
    }


def _key(spec: Spec) -> str:
    return f"{spec.kind}.{spec.variant}"


def _spec_schemas(spec: Spec, schema: Schema) -> dict[str, Any]:
    """The component in its two written forms, and its fields, which both have."""
    fields: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for name, field in spec.config.model_fields.items():
        annotation = annotations_of(spec.config)[name]
        entry = {
            **_any_of(annotation, schema),
            "description": f"{field.description or ''} (default: {default_text(field)})",
        }
        definitions[f"{_key(spec)}.{name}"] = entry
        for spelling in names_of(name, field):
            fields[spelling] = {"$ref": f"#/$defs/{_key(spec)}.{name}"}
    keys = {COMPONENT_KEY: {"const": spec.kind}, VARIANT_KEY: {"const": spec.variant}}
    flat = {
        "title": spec.name,
        "type": "object",
        "properties": {**keys, **fields},
        "required": [VARIANT_KEY],
        "additionalProperties": False,
    }
    inside = {"title": f"fields of {spec.name}", "type": "object", "properties": fields, "additionalProperties": False}
    canonical = {
        "title": spec.name,
        "type": "object",
        "properties": {**keys, CONFIG: {"anyOf": [inside, {"type": "null"}]}},
        "required": [VARIANT_KEY, CONFIG],
        "additionalProperties": False,
    }
    both = {"title": spec.name, "description": spec.summary, "anyOf": [flat, canonical]}
    return {_key(spec): both, **definitions}


def _any_of(annotation: Any, schema: Schema) -> dict[str, Any]:
    options = _options(annotation, schema)
    if slots_of(annotation)[0] or slots_of(slots_of(annotation)[1])[0]:
        computed = [{"$ref": f"#/$defs/{_key(spec)}"} for spec in schema.registry if spec.provides is Anything]
    else:
        computed = [_COMPUTED]
    return {"anyOf": [*options, *computed, _QUESTION, _REFERENCE, _OPEN]}


def _options(annotation: Any, schema: Schema) -> list[dict[str, Any]]:
    """What may stand for an annotation, one schema each."""
    interfaces, _ = slots_of(annotation)
    options: list[dict[str, Any]] = []
    if interfaces:
        specs = sorted(schema.registry.fitting(interfaces), key=lambda spec: spec.name)
        options.append({"title": "variant", "enum": sorted({spec.variant for spec in specs})})
        options += [{"$ref": f"#/$defs/{_key(spec)}"} for spec in specs] + [_OVERLAY]
    annotation = bare(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for argument in arguments:
            if not slots_of(argument)[0] or typing.get_origin(argument) is list:
                options += _options(argument, schema)
    elif origin in (list, tuple, set):
        options.append({"type": "array", "items": _any_of(arguments[0], schema) if arguments else {}})
    elif origin is dict:
        options.append({"type": "object"})
    elif origin is typing.Literal:
        options.append({"enum": list(arguments)})
    elif is_section(annotation):
        options.append(_section(annotation, schema))
    elif isinstance(annotation, type) and issubclass(annotation, Enum):
        names = [*annotation.__members__, *(str(m.value) for m in annotation)]
        options.append({"enum": list(dict.fromkeys(names))})
    else:
        kinds = {int: "integer", float: "number", bool: "boolean", str: "string", Path: "string", type(None): "null"}
        if annotation in kinds:
            options.append({"type": kinds[annotation]})
    return options


def _section(model: type[BaseModel], schema: Schema) -> dict[str, Any]:
    properties = {}
    for name, field in model.model_fields.items():
        entry = {**_any_of(annotations_of(model)[name], schema), "description": field.description or ""}
        for spelling in names_of(name, field):
            properties[spelling] = entry
    # further names under settings are read by interpolations
    return {"title": model.__name__, "type": "object", "properties": properties}
