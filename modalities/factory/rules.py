"""Rules over several fields, and names of things inside other components, checked from the tree."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from pydantic import BaseModel

from modalities.config.faults import Fault
from modalities.config.suggestions import did_you_mean
from modalities.config.tree import (
    BROKEN,
    CONFIG,
    Node,
    Place,
    TreePath,
    dotted,
    is_component,
    reference_name,
)
from modalities.factory.places import standing_place
from modalities.factory.planned_component import PlannedComponent
from modalities.registry.fields import DefaultFrom, NamesOf, Pending, annotations_of, marker_of
from modalities.registry.interfaces import Anything
from modalities.registry.rules import Rule

PROVIDES = ":provides"
"""A rule's input that ends so is the interface of the component at that place."""

GIVEN = ":given"
"""A rule's input that ends so says whether there is anything at that place."""

_UNKNOWN = object()


def check_rules(
    schema: type[BaseModel],
    node: Node,
    path: TreePath,
    owner: str,
    tree: Node,
    components: Mapping[TreePath, PlannedComponent],
    faults: list[Fault],
) -> None:
    """Check every rule whose inputs are known and without fault.

    Args:
        schema: Has the rules.
        node: What the rules' paths start at.
        path: Its place.
        owner: How messages call it, if they need to.
        tree: The whole tree, to follow references in.
        components: Planned so far.
        faults: Receives what is wrong; an input that has a fault already is not judged.
    """
    rules: tuple[Rule, ...] = getattr(schema, "rules", ())
    if not rules:
        return
    broken_before = [fault.path for fault in faults if fault.severity == "error"]
    for rule in rules:
        at_fault = [fault.path for fault in faults if fault.severity == "error"]
        inputs = [_input(name, node, path, tree, components) for name in rule.inputs]
        if any(value is _UNKNOWN for _, _, value in inputs):
            continue
        if any(_touch(bad, where) for _, where, _ in inputs if where for bad in at_fault):
            continue
        if any(
            _comes_from(schema, name, broken_before)
            for name, (n, _, _) in zip(rule.inputs, inputs, strict=True)
            if n is None
        ):
            continue  # it would have come from where something is wrong
        try:
            message = rule.check(*(value for _, _, value in inputs))
        except TypeError:
            continue  # a number given as text by the environment: judged when the component is built
        if message is None:
            continue
        found = [(where, known) for known, where, _ in inputs if known is not None]
        # what the user wrote is to blame before what followed by default
        written = [(where, known) for where, known in found if _is_written(known)]
        where, first = (written or found or [(path, node)])[0]
        place, related = standing_place(first, node)
        notes = [_as_note(i) for i in inputs if i[0] is not first]
        related += [(text, p) for text, p in notes if text and p != place]
        faults.append(
            Fault(
                "rule",
                f"{owner}: {message}" if owner else message,
                where,
                place,
                related=related,
                severity=rule.severity,
            )
        )


def broken_rule(schema: type[BaseModel], model: BaseModel, values: Mapping[str, Any]) -> str | None:
    """The message of the first rule that a component's built values break.

    Args:
        schema: Has the rules.
        model: The validated fields.
        values: The fields as the config gives them, components built.
    """
    for rule in getattr(schema, "rules", ()):
        if rule.severity != "error" or any(name.endswith(PROVIDES) for name in rule.inputs):
            continue
        inputs = [_built_input(name, model, values) for name in rule.inputs]
        if not any(value is _UNKNOWN for value in inputs) and (message := rule.check(*inputs)) is not None:
            return str(message)
    return None


def _built_input(name: str, model: BaseModel, values: Mapping[str, Any]) -> Any:
    if name.endswith(GIVEN):
        return values.get(name.removesuffix(GIVEN)) is not None
    is_optional = name.endswith("?")
    first, *rest = name.removesuffix("?").split(".")
    value: Any = values.get(first)
    validated = getattr(model, first, None)
    if isinstance(validated, int | float) and not isinstance(validated, Enum):
        value = validated
    for part in rest:
        value = value.get(part) if isinstance(value, Mapping) else None
    return _UNKNOWN if value is None and not is_optional else value


def _as_note(rule_input: tuple[Node | None, TreePath, Any]) -> tuple[str, Place]:
    node, where, value = rule_input
    if node is None or not isinstance(value, str | int | float):
        return "", Place()
    place, _ = standing_place(node, node)
    return f"{dotted(tuple(key for key in where if key != CONFIG))} = {value}", place


def _is_written(node: Node) -> bool:
    place, _ = standing_place(node, node)
    return bool(place.file) or bool(place.origin and place.origin.startswith("override"))


def _comes_from(schema: type[BaseModel], name: str, broken: list[TreePath]) -> bool:
    """Whether an absent input has a default place at which something is wrong."""
    marker = marker_of(annotations_of(schema).get(name.removesuffix("?")), DefaultFrom)
    entries = {place.partition(".")[0] for place in marker.places} if marker is not None else set()
    return any(str(path[0]) in entries for path in broken if path)


def check_names(
    component: PlannedComponent, components: Mapping[TreePath, PlannedComponent], faults: list[Fault]
) -> None:
    """Check the fields that name things inside another component, such as ``block_names``."""
    config = component.node.value.get(CONFIG)
    for field_name, annotation in annotations_of(component.spec.config).items():
        marker = marker_of(annotation, NamesOf)
        given = config.get((field_name,)) if marker is not None and config is not None else None
        if marker is None or given is None or not isinstance(given.value, list):
            continue
        named = _owner_of_names(component, marker, components)
        known = named.spec.names.get(marker.what) if named is not None else None
        if known is None or named is None:
            continue
        for index, item in enumerate(given.value):
            if not isinstance(item.value, str) or item.value in known:
                continue
            message = f"{named.spec.name} has no {marker.what.replace('_', ' ').rstrip('s')} `{item.value}`"
            hint = did_you_mean(item.value, known, marker.what.replace("_", " "))
            where = (*component.path, CONFIG, field_name, index)
            related = [("the model is made here", named.node.best_place)]
            faults.append(Fault("unknown-name", message, where, item.place, len(item.value), [hint], related))


def _owner_of_names(
    component: PlannedComponent, marker: NamesOf, components: Mapping[TreePath, PlannedComponent]
) -> PlannedComponent | None:
    """The component that the names are of, seen through everything that wraps it."""
    value = component.fields.get(marker.of)
    for _ in range(len(components) + 1):
        if not isinstance(value, Pending) or value.path not in components:
            return None
        inner = components[value.path]
        if inner.spec.names:
            return inner
        value = next((inner.fields[f] for f in inner.spec.wrapped_fields if f in inner.fields), None)
    return None


def _input(
    name: str, node: Node, path: TreePath, tree: Node, components: Mapping[TreePath, PlannedComponent]
) -> tuple[Node | None, TreePath, Any]:
    """The node, the place and the value of a rule's input; the value is ``_UNKNOWN`` before it is built."""
    wants_interface = name.endswith(PROVIDES)
    is_optional = name.endswith("?")
    found = _follow(node, path, name.removesuffix(PROVIDES).removesuffix(GIVEN).removesuffix("?").split("."), tree)
    if name.endswith(GIVEN):
        return None, (), found is not None and found[0].value is not None
    if found is None:
        return None, (), None if is_optional else _UNKNOWN
    target, where = found
    if wants_interface:
        component = components.get(where)
        known = component is not None and component.provides is not Anything
        return target, where, component.provides if known and component is not None else _UNKNOWN
    if target.value is None and is_optional:
        return target, where, None
    return target, where, target.plain() if _is_known(target) else _UNKNOWN


def _follow(node: Node, path: TreePath, parts: list[str], tree: Node) -> tuple[Node, TreePath] | None:
    for part in [*parts, None]:
        for _ in range(len(tree.value) + 1):
            name = reference_name(node)
            if name is None:
                break
            target = tree.get(tuple(str(name.value).split(".")))
            if target is None:
                return None
            node, path = target, tuple(str(name.value).split("."))
        if part is None:
            break
        if is_component(node) and part not in node.value:
            config = node.value.get(CONFIG)
            if config is None:
                return None
            node, path = config, (*path, CONFIG)
        child = node.get((part,))
        if child is None:
            return None
        node, path = child, (*path, part)
    return node, path


def _is_known(node: Node) -> bool:
    if isinstance(node.value, dict):
        if is_component(node) or reference_name(node) is not None:
            return False
        return all(map(_is_known, node.value.values()))
    if isinstance(node.value, list):
        return all(map(_is_known, node.value))
    return node.value is not BROKEN and node.value is not None


def _touch(one: TreePath, other: TreePath) -> bool:
    shorter = min(len(one), len(other))
    return shorter > 0 and one[:shorter] == other[:shorter]
