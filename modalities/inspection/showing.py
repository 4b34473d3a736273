"""A config as it is understood: canonical or short, with the origin of each value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modalities.composition.compose import ComposedConfig
from modalities.composition.schema import Schema, is_own_entry
from modalities.config.dumping import dump_resolved
from modalities.config.tree import (
    COMPONENT_KEY,
    CONFIG,
    VARIANT_KEY,
    Node,
    Place,
    is_component,
    reference_name,
)
from modalities.config.yaml_writer import tree_text
from modalities.registry.fields import child_annotation, slots_of


def show(composed: ComposedConfig, provenance: bool = False) -> str:
    """The canonical tree with all interpolations answered, but those that belong to a rank, a machine or one run.

    Args:
        composed: The config.
        provenance: Write behind each value where it comes from.
    """
    return dump_resolved(composed.tree, composed.imports, _origin if provenance else None)


def show_short(composed: ComposedConfig) -> str:
    """The config in the shortest form that means the same: interpolations kept, what is found by default left out."""
    tree = shortened(composed.unresolved, composed.schema)
    if composed.imports:
        imports = Node([Node(name, Place()) for name in composed.imports], Place())
        tree = replace(tree, value={"imports": imports, **tree.value})
    return tree_text(tree, lambda node: node)


def shortened(root: Node, schema: Schema) -> Node:
    """The short form of a canonical tree."""
    return replace(
        root,
        value={
            name: child
            if is_own_entry(name)
            else _short(child, child_annotation(schema.recipe, name), schema, is_top=True)
            for name, child in root.value.items()
            if not is_by_default(child)
        },
    )


def is_by_default(node: Node) -> bool:
    """Whether a value came from a declared default place."""
    return node.place.origin is not None and node.place.origin.startswith("default of ")


def _short(node: Node, annotation: Any, schema: Schema, is_top: bool = False) -> Node:
    name = reference_name(node)
    if name is not None:
        return replace(node, value=f"${{ref:{name.value}}}")
    if is_component(node):
        return _short_component(node, annotation, schema)
    if isinstance(node.value, dict):
        inside = {
            key: _short(child, child_annotation(annotation, key), schema)
            for key, child in node.value.items()
            if not is_by_default(child)
        }
        return replace(node, value=inside)
    if isinstance(node.value, list):
        items = [_short(child, child_annotation(annotation, i), schema) for i, child in enumerate(node.value)]
        return replace(node, value=items)
    return node


def _short_component(node: Node, annotation: Any, schema: Schema) -> Node:
    spec = schema.spec_of(node)
    annotations = spec.annotations() if spec is not None else {}
    config = node.value.get(CONFIG)
    if config is None or not isinstance(config.value, dict):
        return node
    fields = {
        key: _short(child, annotations.get(key), schema)
        for key, child in config.value.items()
        if not is_by_default(child)
    }
    if set(fields) & {COMPONENT_KEY, VARIANT_KEY, CONFIG}:
        return replace(node, value={**node.value, CONFIG: replace(config, value=fields)})
    kind = {COMPONENT_KEY: node.value[COMPONENT_KEY]} if COMPONENT_KEY in node.value else {}
    variant = {VARIANT_KEY: node.value[VARIANT_KEY]} if VARIANT_KEY in node.value else {}
    if spec is not None and _is_told_by_slot(spec.kind, spec.variant, annotation, schema):
        kind = {}
        if not fields:
            return replace(node, value=spec.variant)
    return replace(node, value={**kind, **variant, **fields})


def _is_told_by_slot(kind: str, variant: str, annotation: Any, schema: Schema) -> bool:
    interfaces, _ = slots_of(annotation)
    fitting = schema.registry.fitting(interfaces) if interfaces else []
    return [spec.kind for spec in fitting if spec.variant == variant] == [kind]


def _origin(node: Node) -> str:
    """Where a value comes from, in a few words."""
    if isinstance(node.value, dict) and node.value:
        return ""
    origin = str(node.place)
    if node.via:
        origin += " via " + " via ".join(dict.fromkeys(expression for expression, _ in node.via))
    return origin
