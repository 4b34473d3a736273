"""What may stand where in a config: the registry's components in the slots of a recipe."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from modalities.config.tree import COMPONENT_KEY, CONFIG, VARIANT_KEY, Key, Node, TreePath, is_component, reference_name
from modalities.registry.fields import (
    DefaultFrom,
    annotations_of,
    bare,
    child_annotation,
    is_section,
    marker_of,
    names_of,
    slots_of,
)
from modalities.registry.interfaces import Interface
from modalities.registry.registry import Registry
from modalities.registry.spec import Spec

OWN_ENTRIES = ("user",)
OWN_PREFIX = "x-"

_HEAD = (COMPONENT_KEY, VARIANT_KEY, CONFIG)


def is_own_entry(name: Key) -> bool:
    """Whether a top-level entry is the user's own, which nothing reads or checks."""
    return name in OWN_ENTRIES or str(name).startswith(OWN_PREFIX)


@dataclass(frozen=True)
class Schema:
    """The registry, and the recipe of the command that reads the config.

    Args:
        registry: Where components are looked up.
        recipe: Schema of the top-level entries.
    """

    registry: Registry
    recipe: type[BaseModel]

    def spec_of(self, node: Node) -> Spec | None:
        """The spec of a component's entry, if both of its keys are understood."""
        if not is_component(node):
            return None
        kind, variant = node.value.get(COMPONENT_KEY), node.value.get(VARIANT_KEY)
        if kind is None or variant is None or not isinstance(kind.value, str) or not isinstance(variant.value, str):
            return None
        return self.registry.get(kind.value, variant.value)

    def annotation_at(self, root: Node, path: TreePath) -> Any:
        """The annotation of the value at a canonical path, whether it is there or not; None if there is none."""
        annotation: Any = self.recipe
        node: Node | None = root
        rest = list(path)
        while rest:
            key = rest.pop(0)
            spec = self.spec_of(node) if node is not None else None
            if spec is not None and key == CONFIG and rest:
                node = node.get((key,)) if node is not None else None
                key = rest.pop(0)
                annotation = spec.annotations().get(str(key))
            elif annotation is not None:
                annotation = child_annotation(annotation, key)
            node = node.get((key,)) if node is not None else None
        return annotation

    def slot_at(self, root: Node, path: TreePath) -> tuple[type[Interface], ...]:
        """The interfaces that the place takes a component of; none if it takes no component."""
        return slots_of(self.annotation_at(root, path))[0]

    def names_below(self, root: Node, path: TreePath) -> list[str]:
        """Names that may stand below a canonical path: those that are there and those that a schema declares."""
        node = root.get(path)
        if node is not None and is_component(node):
            spec = self.spec_of(node)
            config = node.value.get(CONFIG)
            declared = list(spec.annotations()) if spec is not None else []
            present = list(config.value) if config is not None and isinstance(config.value, dict) else []
        else:
            declared = list(_declared_names(self.annotation_at(root, path) if path else self.recipe))
            present = list(node.value) if node is not None and isinstance(node.value, dict) else []
        return list(dict.fromkeys([*(str(name) for name in present), *declared]))

    def locate(self, root: Node, dotted_path: str) -> TreePath:
        """The canonical path that a dotted path means.

        ``optimizer.lr`` is ``optimizer.config.lr``. A first name that is no entry is looked for in ``settings`` and
        among the recipe's shorthands; a name that a wrapper does not have is looked for in what it wraps; references are
        followed as long as something comes after them.
        """
        parts = dotted_path.split(".")
        top = root.value if isinstance(root.value, dict) else {}
        if parts[0] not in top and (len(parts) > 1 or parts[0] not in annotations_of(self.recipe)):
            shorthands: dict[str, str] = getattr(self.recipe, "shorthands", {})
            if parts[0] in shorthands and len(parts) > 1:
                parts = [*shorthands[parts[0]].split("."), *parts[1:]]
            elif parts[0] not in annotations_of(self.recipe) and parts[0] in self.names_below(root, ("settings",)):
                parts = ["settings", *parts]
        return self._descend(root, (), parts)

    def _descend(self, root: Node, path: TreePath, parts: list[str]) -> TreePath:
        seen: set[str] = set()
        while parts:
            node = root.get(path)
            if node is not None and (name := reference_name(node)) is not None and parts[0] not in node.value:
                if str(name.value) in seen:
                    return (*path, *parts)
                seen.add(str(name.value))
                path = tuple(str(name.value).split("."))
                continue
            if node is not None and is_component(node) and parts[0] not in _HEAD:
                within = self._wrapped_with(root, path, node, parts[0], {path})
                if within is not None:
                    path = within
                    continue
                elsewhere = self._default_of(root, node, parts[0]) if len(parts) > 1 else None
                if elsewhere is not None:
                    path, parts = elsewhere, parts[1:]
                    continue
                path = (*path, CONFIG)
                node = node.get((CONFIG,))
            key: Key = parts[0]
            if node is not None and isinstance(node.value, list) and parts[0].lstrip("-").isdigit():
                key = int(parts[0])
            elif node is not None and isinstance(node.value, dict) and key not in node.value:
                key = self._given_alias(root, path, node, parts[0])
            path, parts = (*path, key), parts[1:]
        return path

    def _default_of(self, root: Node, node: Node, name: str) -> TreePath | None:
        """Where a component's field will be taken from, if it is not given."""
        spec, config = self.spec_of(node), node.value.get(CONFIG)
        given = config.value if config is not None and isinstance(config.value, dict) else {}
        marker = marker_of(spec.annotations().get(name), DefaultFrom) if spec is not None else None
        if marker is None or name in given:
            return None
        places = (tuple(place.split(".")) for place in marker.places if "${" not in place)
        return next((place for place in places if len(place) == 1 and root.get(place) is not None), None)

    def _wrapped_with(self, root: Node, path: TreePath, node: Node, name: str, seen: set[TreePath]) -> TreePath | None:
        """The path of the wrapped component that has a field which the wrapper has not."""
        if name in self.names_below(root, path):
            return None
        spec = self.spec_of(node)
        for wrapped in spec.wrapped_fields if spec is not None else ():
            inner = self._descend_to_component(root, (*path, CONFIG, wrapped))
            if inner is None or inner in seen:
                continue
            seen.add(inner)
            inner_node = root.get(inner)
            assert inner_node is not None
            if name in self.names_below(root, inner):
                return inner
            if (deeper := self._wrapped_with(root, inner, inner_node, name, seen)) is not None:
                return deeper
        return None

    def _descend_to_component(self, root: Node, path: TreePath) -> TreePath | None:
        for _ in range(len(root.value) + 1):
            node = root.get(path)
            if node is None:
                return None
            name = reference_name(node)
            if name is None:
                return path if is_component(node) else None
            path = tuple(str(name.value).split("."))
        return None  # references in a circle: the plan tells

    def _given_alias(self, root: Node, path: TreePath, node: Node, name: str) -> str:
        """The spelling under which a field is given already, if it has several."""
        owner = root.get(path[:-1]) if path[-1:] == (CONFIG,) else None
        spec = self.spec_of(owner) if owner is not None else None
        for field_name, field in spec.config.model_fields.items() if spec is not None else ():
            spellings = names_of(field_name, field)
            if name in spellings:
                return next((s for s in spellings if s in node.value), name)
        return name


def _declared_names(annotation: Any) -> Iterator[str]:
    annotation = bare(annotation)
    if is_section(annotation):
        yield from annotations_of(annotation)
    else:
        for option in typing.get_args(annotation):
            if typing.get_origin(annotation) not in (list, dict, tuple, set):
                yield from _declared_names(option)
