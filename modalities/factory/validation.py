"""Pydantic's verdict on a component's fields, told in places of the config."""

from __future__ import annotations

import types
import typing
from typing import Any

from pydantic import BaseModel, ValidationError

from modalities.config.faults import Fault
from modalities.config.suggestions import did_you_mean, nearest
from modalities.config.tree import BROKEN, CONFIG, Node, Place, TreePath, dotted
from modalities.factory.places import standing_place
from modalities.factory.planned_component import PlannedComponent
from modalities.factory.wording import SCALARS, complaint_text, got, hints_for, needed_scalar, scalar_hints
from modalities.registry.fields import (
    DefaultFrom,
    Pending,
    Slot,
    annotations_of,
    bare,
    child_annotation,
    is_section,
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
    covered = _drop_consequences(best)
    for location, (_, complaint, value) in best.items():
        fault = _fault(model, complaint, location, value, node, path, owner, registry, components)
        if location in covered:
            fault.covers = (*path, *covered[location])
        faults.append(fault)


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
            if here is None or not wanted or type(value) in wanted or _comes_from_environment(here):
                continue
            message = f"{_named(owner, location)}: {needed_scalar(wanted)}, got {got(value, here)}"
            faults.append(_at("bad-value", message, (*path, *location), here, node, scalar_hints(value, here), value))
            told.add(location)
    return told


def _scalars_of(annotation: Any) -> set[type] | None:
    """The numbers and truth values that an annotation takes; None if it takes anything else as well."""
    if marker_of(annotation, Slot) is not None:
        return set(SCALARS)
    annotation = bare(annotation)
    if annotation in SCALARS:
        return {int, float} if annotation is float else {annotation}
    if annotation is type(None):
        return set()
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        options = [_scalars_of(option) for option in typing.get_args(annotation)]
        return None if any(option is None for option in options) else set().union(*(o for o in options if o))
    return None


def _comes_from_environment(node: Node) -> bool:
    """Environment variables are text; what they spell is read as the field needs it."""
    return any("_env:" in expression or "oc.env:" in expression for expression, _ in node.via)


def _at(
    code: str,
    message: str,
    path: TreePath,
    here: Node,
    holder: Node,
    hints: list[str],
    value: Any = None,
    related: list[tuple[str, Place]] | None = None,
) -> Fault:
    """A fault at the place where a value really stands; where it is used is a note."""
    place, notes = standing_place(here, holder)
    span = len(str(value)) if isinstance(value, str | int | float) else 1
    related = [*notes, *(related or [])]
    return Fault(code, message, path, place, span, hints, related, is_copy=bool(here.via))


def _drop_consequences(best: dict[TreePath, tuple[int, Any, Any]]) -> dict[TreePath, TreePath]:
    """A misspelt required field is one fault, not an unknown and a missing one; and a section of an unknown kind is one.

    Returns:
        The missing fields that are left out, by the misspelt ones.
    """
    for location, (_, complaint, _) in list(best.items()):
        if complaint["type"] == "enum":
            # `norm_type` says what the `config` beside it may hold
            inside = (*location[:-1], CONFIG)
            for other in [o for o in best if o[: len(inside)] == inside]:
                del best[other]
    covered: dict[TreePath, TreePath] = {}
    missing = [location for location, (_, complaint, _) in best.items() if complaint["type"] == "missing"]
    for location, (_, complaint, _) in list(best.items()):
        if complaint["type"] != "extra_forbidden":
            continue
        meant = nearest(location[-1], [other[-1] for other in missing if other[:-1] == location[:-1]], limit=1)
        if meant:
            covered[location] = (*location[:-1], meant[0])
            best.pop(covered[location], None)
    return covered


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
    kind = complaint["type"]
    if kind == "missing":
        return _missing(model, location, node, full_path, owner, registry)
    here = node.get(location) or node
    annotation: Any = model
    for step in location:
        annotation = child_annotation(annotation, step)
    if kind == "extra_forbidden":
        return _unknown_field(model, location, here, full_path, owner)
    if value is None and slots_of(annotation)[0]:
        kind = "not_component"  # whatever the first way of giving it, or several of it, complains of
        text = "needs a component"
    else:
        text = complaint_text(complaint, annotation)
    if not location:
        return _at("invalid", f"{owner}: {text}", path, _blamed_field(text, node), node, [])
    related: list[tuple[str, Place]] = []
    hints = hints_for(complaint, value, here)
    if isinstance(value, Pending):
        text += f", got {value.label}" if kind != "interface" else ""
        if value.path in components:
            made = components[value.path]
            related.append((f"{made.spec.name} is made here", made.node.best_place))
    elif kind == "not_component":
        text += f", got {got(value, here)}"
        hints += _variants(annotation, registry)
    elif kind != "path_not_found" and not (isinstance(value, str) and value in text):
        text += f", got {got(value, here)}"
    code = "interface" if kind in ("interface", "not_component") else "bad-value"
    message = f"{_named(owner, location)}: {text}"
    return _at(code, message, full_path, here, node, hints, value, related)


def _unknown_field(model: Any, location: TreePath, here: Node, full_path: TreePath, owner: str) -> Fault:
    holder = model
    for step in location[:-1]:
        holder = child_annotation(holder, step)
    hint = did_you_mean(location[-1], _field_names(holder), "fields")
    message = f"{owner} has no field `{dotted(location)}`"
    return Fault("unknown-field", message, full_path, here.best_place, len(str(location[-1])), [hint])


def _variants(annotation: Any, registry: Registry) -> list[str]:
    interfaces, _ = slots_of(annotation)
    if not interfaces:
        return []
    fitting = sorted({s.variant for s in registry.fitting(interfaces, known_only=True) if s.is_available})
    return [f"variants: {', '.join(fitting[:12])}{', …' if len(fitting) > 12 else ''}"]


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


def _missing(
    model: type[BaseModel], location: TreePath, node: Node, full_path: TreePath, owner: str, registry: Registry
) -> Fault:
    holder = node.get(location[:-1]) or node
    schema: Any = model
    for step in location[:-1]:
        schema = child_annotation(schema, step)
    annotation = child_annotation(schema, location[-1])
    places = marker_of(annotation, DefaultFrom)
    if places is not None:
        hints = [f"it is taken from {' or '.join(f'`{place}`' for place in places.places)} where that is given"]
    else:
        hints = _variants(annotation, registry)
    known = _field_names(schema)
    given = [key for key in holder.value if key not in known] if isinstance(holder.value, dict) else []
    if near := nearest(location[-1], given, limit=1):
        hints.append(f"`{near[0]}` is given: a slip of the pen?")
    if isinstance(location[-1], int):
        text = complaint_text({"type": "tuple_type", "msg": ""}, schema)
        message = f"{_named(owner, location[:-1])}: {text}, got {got(holder.plain(), holder)}"
        return _at("bad-value", message, full_path[:-1], holder, node, [])
    place, _ = standing_place(holder, holder)
    is_top = len(full_path) == 1
    place = Place(place.file, 1, 1) if is_top and place.file else holder.best_place
    fault = Fault("missing-field", f"{owner} needs `{dotted(location)}`", full_path, place, 0 if is_top else 1, hints)
    fault.asked_for = places.places if places is not None else ()
    return fault


def _field_names(schema: Any) -> list[str]:
    """Names that a (possibly optional, possibly annotated) model or union of models declares."""
    if is_section(schema):
        return list(annotations_of(schema))
    options = getattr(schema, "__args__", ()) or ((schema.__origin__,) if hasattr(schema, "__origin__") else ())
    return [name for option in options for name in _field_names(option)]
