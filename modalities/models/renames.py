"""Older shapes of model settings."""

from __future__ import annotations

from dataclasses import replace

from modalities.config.tree import COMPONENT_KEY, CONFIG, VARIANT_KEY, Node


def norm_settings(node: Node) -> Node:
    """A norm that was given as a component, as the settings of a norm."""
    if not isinstance(node.value, dict) or VARIANT_KEY not in node.value:
        return node
    fields = {key: child for key, child in node.value.items() if key not in (COMPONENT_KEY, VARIANT_KEY, CONFIG)}
    config = node.value.get(CONFIG) or Node(fields, node.place)
    return replace(node, value={"norm_type": node.value[VARIANT_KEY], CONFIG: config})
