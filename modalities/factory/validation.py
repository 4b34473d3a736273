"""Pydantic's verdict on a component's fields, told in places of the config."""

from __future__ import annotations

import types
import typing
from typing import Any

from pydantic import BaseModel, ValidationError

from modalities.config.faults import Fault
from modalities.config.suggestions import did_you_mean, nearest
from modalities.config.tree import BROKEN, Node, Place, TreePath, dotted
from modalities.factory.planned_component import PlannedComponent
from modalities.registry.fields import (
    DefaultFrom,
    Pending,
    Slot,
    annotations_of,
    child_annotation,
    marker_of,
    slots_of,
)
from modalities.registry.interfaces import Anything, IntValue
from modalities.registry.registry import Registry

THE_CONFIG = "the config"
"""How messages call what is no component."""

_RANK = {"extra_forbidden": 4, "missing": 4, "interface": 3, "not_component": 1}
"""Of several complaints of a union's branches about one place, the most telling wins."""


def validate(
    model: type[BaseModel],
    values: dict[str, Any],
    node: Node,
    path: TreePath,
    owner: str,
    registry: Registry,
    components: dict[TreePath, PlannedComponent],
    faults: list[Fault],
) -> None:
    """Check values against a schema as far as they are known before anything is built.

    Args:
        model: The schema.
        values: What is to be checked; may hold :class:`Pending` and ``BROKEN``.
        node: The mapping that the values come from.
        path: Its place in the tree.
        owner: How messages call the component.
        registry: For suggestions.
        components: Planned so far, to point at where a wrong component is made.
        faults: Receives the verdict.
    """
    told = _loose_scalars(model, values, node, path, owner, faults)
    try:
        model.model_validate(values)
        return
    except ValidationError as error:
        complaints = error.errors(include_url=False)
    best: dict[TreePath, tuple[int, Any, Any]] = {}
    for complaint in complaints:
        location, value = _walk(values, complaint)
        kind = complaint["type"]
        if _is_premature(kind, value) or location in told:
            continue
        rank = _RANK.get(kind, 2)
        if location not in best or rank > best[location][0]:
            best[location] = (rank, complaint, value)
    _drop_misspelt(best)
    for location, (_, complaint, value) in best.items():
        faults.append(_fault(model, complaint, location, value, node, path, owner, registry, components))


def _loose_scalars(
    model: type[BaseModel], values: Any, node: Node, path: TreePath, owner: str, faults: list[Fault]
) -> set[TreePath]:
    """Scalars that pydantic would bend into shape: quoted numbers, truth values as numbers, words as truth values."""
    told: set[TreePath] = set()
    waiting: list[tuple[TreePath, Any, Any]] = [((), values, model)]
    while waiting:
        location, value, annotation = waiting.pop()
        if isinstance(value, dict):
            waiting += [((*location, k), v, child_annotation(annotation, k)) for k, v in value.items()]
        elif isinstance(value, list):
            waiting += [((*location, i), v, child_annotation(annotation, i)) for i, v in enumerate(value)]
        elif isinstance(value, str | bool) and annotation is not None:
            here = node.get(location)
            wanted = _scalars_of(annotation)
            if here is None or wanted is None or type(value) in wanted or _comes_from_environment(here):
                continue
            names = " or ".join(sorted(_SCALARS[t] for t in wanted if t is not int or float not in wanted))
            what = (
                f'the text "{value}"'
                if isinstance(value, str)
                else f"`{here.raw or str(value).lower()}`, a truth value"
            )
            message = f"{_named(owner, location)}: needs {names}, got {what}"
            faults.append(
                Fault("bad-value", message, (*path, *location), here.place, len(str(value)), _type_hints(value, here))
            )
            told.add(location)
    return told


_SCALARS: dict[type, str] = {int: "a whole number (int)", float: "a number (float)", bool: "true or false (bool)"}


def _scalars_of(annotation: Any) -> set[type] | None:
    """The numbers and truth values that an annotation takes; None if it takes anything else as well."""
    if hasattr(annotation, "__metadata__"):
        if any(isinstance(m, Slot) for m in annotation.__metadata__):
            return set(_SCALARS)
        annotation = annotation.__origin__
    if annotation in _SCALARS:
        return {int, float} if annotation is float else {annotation}
    if annotation is type(None):
        return set()
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        options = [_scalars_of(option) for option in typing.get_args(annotation)]
        return None if any(option is None for option in options) else set().union(*(o for o in options if o))
    if typing.get_origin(annotation) in (list, tuple, dict, set):
        return set()
    return None


def _comes_from_environment(node: Node) -> bool:
    """Environment variables are text; what they spell is read as the field needs it."""
    return any("_env:" in expression or "oc.env:" in expression for expression, _ in node.via)


def _type_hints(value: Any, here: Node) -> list[str]:
    if isinstance(value, bool):
        shown = here.raw or str(value).lower()
        if shown.lower() not in ("true", "false"):
            return [f'YAML 1.1 reads a bare `{shown}` as {str(value).lower()}: write "{shown}" for the text']
        return []
    try:
        float(value)
    except ValueError:
        return []
    return ["leave out the quotes"] if here.place.file else []


def _drop_misspelt(best: dict[TreePath, tuple[int, Any, Any]]) -> None:
    """A misspelt required field is one fault, not an unknown and a missing one."""
    missing = [location for location, (_, complaint, _) in best.items() if complaint["type"] == "missing"]
    for location, (_, complaint, _) in list(best.items()):
        if complaint["type"] != "extra_forbidden":
            continue
        meant = nearest(location[-1], [other[-1] for other in missing if other[:-1] == location[:-1]], limit=1)
        if meant:
            best.pop((*location[:-1], meant[0]), None)


def _walk(values: Any, complaint: Any) -> tuple[TreePath, Any]:
    """Follow an error's location through the data; what is not there is a label of a union's branch."""
    location: list[str | int] = []
    value = values
    for step in complaint["loc"]:
        if isinstance(value, Pending):
            break
        try:
            value = value[step]
            location.append(step)
        except (KeyError, IndexError, TypeError):
            if complaint["type"] == "missing" and step == complaint["loc"][-1]:
                location.append(step)
    return tuple(location), value


def _is_premature(kind: str, value: Any) -> bool:
    """Whether a complaint is about something that only the built instance, or an earlier fault, can settle."""
    if kind in ("interface", "extra_forbidden"):
        return False
    if isinstance(value, Pending):
        number = kind.startswith(("int", "float"))
        return value.provides is Anything or kind == "missing" or (number and issubclass(value.provides, IntValue))
    if value is BROKEN:
        return kind != "missing"
    # a list of components is no component itself, but what is wrong with it is told of its items
    return kind == "not_component" and _holds_unknown(value)


def _holds_unknown(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_unknown, value.values()))
    if isinstance(value, list):
        return any(map(_holds_unknown, value))
    return isinstance(value, Pending) or value is BROKEN


def _fault(
    model: type[BaseModel],
    complaint: Any,
    location: TreePath,
    value: Any,
    node: Node,
    path: TreePath,
    owner: str,
    registry: Registry,
    components: dict[TreePath, PlannedComponent],
) -> Fault:
    full_path = (*path, *location)
    if complaint["type"] == "missing":
        return _missing(model, location, node, full_path, owner, registry)
    here = node.get(location) or node
    if complaint["type"] == "extra_forbidden":
        holder: Any = model
        for step in location[:-1]:
            holder = child_annotation(holder, step)
        names = _field_names(holder)
        hint = did_you_mean(location[-1], names, "fields")
        message = f"{owner} has no field `{dotted(location)}`"
        return Fault("unknown-field", message, full_path, here.best_place, len(str(location[-1])), [hint])
    text = complaint["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if not location:
        blamed = _blamed_field(text, node)
        leading = [(f"`{expression}` leads here", place) for expression, place in blamed.via]
        return Fault("invalid", f"{owner}: {text}", path, blamed.place, related=leading)
    shown = f": `{value}`" if isinstance(value, str | int | float) and str(value) not in text else ""
    if isinstance(value, Pending) and complaint["type"] != "interface":
        text += f", got {value.label}"
    code = "interface" if complaint["type"] in ("interface", "not_component") else "bad-value"
    related: list[tuple[str, Place]] = [(f"`{expression}` leads here", p) for expression, p in here.via]
    if isinstance(value, Pending) and value.path in components:
        related.append((f"{components[value.path].spec.name} is made here", components[value.path].node.best_place))
    hints = _hints(complaint, value, here)
    message = f"{_named(owner, location)}: {text[:1].lower() + text[1:]}{shown}"
    return Fault(code, message, full_path, here.place, len(str(value)) if shown else 1, hints, related)


def _named(owner: str, location: TreePath) -> str:
    return dotted(location) if owner == THE_CONFIG else f"{owner}.{dotted(location)}"


def _blamed_field(text: str, node: Node) -> Node:
    """The first field that a complaint over several fields names."""
    if isinstance(node.value, dict):
        mentioned = [key for key in node.value if str(key) in text]
        if mentioned:
            blamed: Node = node.value[min(mentioned, key=lambda key: (node.value[key].value is BROKEN, -len(str(key))))]
            return blamed
    return node


def _hints(complaint: Any, value: Any, here: Node) -> list[str]:
    hints = []
    if here.raw and isinstance(here.value, bool) and here.raw.lower() not in ("true", "false"):
        hints.append(f'YAML 1.1 reads a bare `{here.raw}` as {str(here.value).lower()}: write "{here.raw}"')
    allowed = complaint.get("ctx", {}).get("allowed") or complaint.get("ctx", {}).get("expected")
    if isinstance(value, str) and isinstance(allowed, str):
        hints.append(
            did_you_mean(value, [word.strip("' ") for word in allowed.replace(" or ", ",").split(",")], "allowed")
        )
    if complaint["type"] == "path_not_found":
        hints.append("relative paths start at the folder in which the command runs")
    return hints


def _missing(
    model: type[BaseModel], location: TreePath, node: Node, full_path: TreePath, owner: str, registry: Registry
) -> Fault:
    holder = node.get(location[:-1]) or node
    schema: Any = model
    for step in location[:-1]:
        schema = child_annotation(schema, step)
    hints = []
    annotation = child_annotation(schema, location[-1])
    interfaces, _ = slots_of(annotation)
    places = marker_of(annotation, DefaultFrom)
    if places is not None:
        hints.append(f"it is taken from {' or '.join(f'`{place}`' for place in places.places)} where that is given")
    elif interfaces:
        fitting = sorted(s.name for s in registry.fitting(interfaces, known_only=True) if s.is_available)
        hints.append(f"variants: {', '.join(fitting[:12])}{', …' if len(fitting) > 12 else ''}")
    known = _field_names(schema)
    given = [key for key in holder.value if key not in known] if isinstance(holder.value, dict) else []
    if near := nearest(location[-1], given, limit=1):
        hints.append(f"`{near[0]}` is given: a slip of the pen?")
    if isinstance(location[-1], int):
        message = f"{_named(owner, location[:-1])}: needs more values, got {len(holder.value)}"
        return Fault("bad-value", message, full_path[:-1], holder.place, 1, hints)
    return Fault("missing-field", f"{owner} needs `{dotted(location)}`", full_path, holder.best_place, 1, hints)


def _field_names(schema: Any) -> list[str]:
    """Names that a (possibly optional, possibly annotated) model or union of models declares."""
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return list(annotations_of(schema))
    options = getattr(schema, "__args__", ()) or ((schema.__origin__,) if hasattr(schema, "__origin__") else ())
    return [name for option in options for name in _field_names(option)]
