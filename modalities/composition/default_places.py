"""Fill in fields that are not given from the places that they declare."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

from pydantic import BaseModel

from modalities.composition.schema import Schema, is_own_entry
from modalities.composition.short_forms import component_node
from modalities.config.tree import (
    BROKEN,
    CONFIG,
    INSTANCE_KEY,
    PASS_TYPE,
    Node,
    Place,
    TreePath,
    is_component,
    reference_name,
)
from modalities.registry.fields import DefaultFrom, annotations_of, bare, is_section, marker_of, names_of, slots_of
from modalities.registry.spec import Spec

_PLAIN_KEY = re.compile(r"[\w-]+")


def fill(root: Node, schema: Schema) -> None:
    """Give every absent field that declares places the value of the first place that is there, in this tree.

    The value is written as the question that leads there (``${settings.experiment_id}``, or a reference), so that the
    config goes on telling where it comes from.
    """
    _Filler(root, schema).fill()


class _Filler:
    def __init__(self, root: Node, schema: Schema) -> None:
        self.root, self.schema = root, schema
        self.done: set[TreePath] = set()

    def fill(self) -> None:
        self._section(self.schema.recipe, ())
        for name in list(self.root.value):
            if not is_own_entry(name):
                self._below(self.root.value[name], (name,))

    def _below(self, node: Node, path: TreePath) -> None:
        if is_component(node):
            self._component(node, path)
            node = node.value.get(CONFIG) or node
            path = (*path, CONFIG)
        if reference_name(node) is not None:
            return
        if isinstance(node.value, dict):
            for key, child in list(node.value.items()):
                self._below(child, (*path, key))
        elif isinstance(node.value, list):
            for index, child in enumerate(node.value):
                self._below(child, (*path, index))

    def _component(self, node: Node, path: TreePath) -> None:
        if path in self.done:
            return
        self.done.add(path)
        spec = self.schema.spec_of(node)
        config = node.value.get(CONFIG)
        if spec is None or config is None or not isinstance(config.value, dict):
            return
        for name, annotation, spellings in _fields_with_places(spec.config):
            if not any(spelling in config.value for spelling in spellings):
                found = self._first_place(annotation, f"default of {spec.name}.{name}", (*path, CONFIG, name))
                if found is not None:
                    config.value[name] = found

    def _section(self, section: type[BaseModel], path: TreePath) -> None:
        """Fields of the recipe, and of the plain sections in it."""
        for name, field in section.model_fields.items():
            inside = (*path, name)
            holder = self.root.get(path)
            if is_section(field.annotation):
                self._section(field.annotation, inside)
        for name, annotation, spellings in _fields_with_places(section):
            holder = self.root.get(path)
            if holder is not None and not isinstance(holder.value, dict):
                return
            if holder is not None and any(spelling in holder.value for spelling in spellings):
                continue
            origin = f"default of {'.'.join([*map(str, path), name])}"
            found = self._first_place(annotation, origin, (*path, name))
            made = self._make_section(path, found.place) if found is not None else None
            if made is not None:
                made.value[name] = found

    def _make_section(self, path: TreePath, place: Place) -> Node | None:
        node = self.root
        for key in path:
            if not isinstance(node.value, dict):
                return None  # something else stands in place of a section: the plan tells
            node = node.value.setdefault(key, Node({}, place))
        return node

    def _first_place(self, annotation: Any, origin: str, asking: TreePath) -> Node | None:
        marker = marker_of(annotation, DefaultFrom)
        interfaces, _ = slots_of(annotation)
        for place in marker.places if marker is not None else ():
            if "${" in place:
                return Node(place, Place(origin=origin))
            path = self._find(place)
            node = self.root.get(path) if path is not None else None
            if path is None or node is None or path == asking:
                continue
            if isinstance(node.value, dict | list) and _is_enum(annotation):
                continue  # another variant's field of the same name
            if reference_name(node) is not None or is_component(node) or _holds_components(node):
                return self._share(node, path, Place(origin=origin))
            if interfaces and isinstance(node.value, str):
                if (component := self._variant(node.value, interfaces, Place(origin=origin), asking)) is not None:
                    return component
                continue
            if all(isinstance(key, str) and _PLAIN_KEY.fullmatch(key) for key in path):
                shown = ".".join(str(key) for key in path if key != CONFIG)
                return Node(f"${{{shown}}}", Place(origin=origin))
        return None

    def _find(self, place: str) -> TreePath | None:
        """Where a place is in the tree; what components on the way get by default counts as there."""
        parts = place.split(".")
        for length in range(1, len(parts) + 1):
            path = self.schema.locate(self.root, ".".join(parts[:length]))
            node = self.root.get(path)
            if node is None:
                return None
            target = self.schema.locate(self.root, ".".join([*parts[:length], "_"]))
            for depth in range(1, len(target)):
                on_the_way = self.root.get(target[:depth])
                if on_the_way is not None and is_component(on_the_way):
                    self._component(on_the_way, target[:depth])
        path = self.schema.locate(self.root, place)
        node = self.root.get(path)
        return None if node is None or node.value is None or node.value is BROKEN else path

    def _share(self, node: Node, path: TreePath, place: Place) -> Node | None:
        name = reference_name(node)
        if name is not None:
            target = str(name.value)
        elif CONFIG in path[:-1]:
            return None  # a component inside another has no name to refer to
        else:
            target = ".".join(str(key) for key in path)
        entry = {INSTANCE_KEY: Node(target, place), PASS_TYPE: Node("BY_REFERENCE", place)}
        return Node(entry, place)

    def _variant(self, name: str, interfaces: Any, place: Place, path: TreePath) -> Node | None:
        """The component that another entry's variant names here, if it gets all that it needs."""
        specs = [spec for spec in self.schema.registry.fitting(interfaces) if spec.variant == name]
        if len(specs) != 1 or not specs[0].is_available:
            return None
        node = component_node(specs[0], place, None)
        self._component(node, path)
        self.done.discard(path)
        return node if _has_all(specs[0], node) else None


def _fields_with_places(model: type[BaseModel]) -> list[tuple[str, Any, list[str]]]:
    found = []
    for name, field in model.model_fields.items():
        marker = next((m for m in field.metadata if isinstance(m, DefaultFrom)), None)
        if marker is not None:
            annotation = annotations_of(model)[name]
            found.append((name, annotation, names_of(name, field)))
    return found


def _is_enum(annotation: Any) -> bool:
    kind = bare(annotation)
    return isinstance(kind, type) and issubclass(kind, Enum)


def _holds_components(node: Node) -> bool:
    return isinstance(node.value, list) and any(
        is_component(item) or reference_name(item) is not None for item in node.value
    )


def _has_all(spec: Spec, node: Node) -> bool:
    given = node.value[CONFIG].value
    return all(
        not field.is_required() or any(spelling in given for spelling in names_of(name, field))
        for name, field in spec.config.model_fields.items()
    )
