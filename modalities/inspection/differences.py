"""What differs between two configs in meaning: by component and field, defaults included."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import BaseModel

from modalities.composition.compose import ComposedConfig
from modalities.composition.schema import Schema, is_own_entry
from modalities.config.dumping import value_or_question
from modalities.config.tree import CONFIG, VARIANT_KEY, Node, Place, TreePath, dotted, is_component, reference_name
from modalities.config.yaml_writer import scalar_text
from modalities.registry.fields import bare, child_annotation, is_section, names_of


@dataclass(frozen=True)
class Leaf:
    """A value to compare.

    Args:
        value: What it is, in plain Python.
        place: Where it was set.
    """

    value: Any
    place: Place


@dataclass(frozen=True)
class Difference:
    """A path at which two configs differ; a side that has nothing there is None."""

    path: str
    old: Leaf | None
    new: Leaf | None


def differences(old: ComposedConfig, new: ComposedConfig) -> list[Difference]:
    """Every path at which the canonical, resolved configs differ; how they are written does not matter.

    Where a component was replaced by another variant, the variant and the fields of both are compared.
    """
    left, right = leaves(old), leaves(new)
    paths = [*left, *(path for path in right if path not in left)]
    found = []
    for path in paths:
        a, b = left.get(path), right.get(path)
        if a is None or b is None or not _same(a.value, b.value):
            found.append(Difference(path, a, b))
    return found


def diff_text(found: list[Difference]) -> str:
    """The differences as lines, with where each side comes from."""
    lines = []
    for difference in found:
        if difference.old is None:
            assert difference.new is not None
            lines.append(f"+ {difference.path} = {_shown(difference.new)}")
        elif difference.new is None:
            lines.append(f"- {difference.path} = {_shown(difference.old)}")
        else:
            old, new = _shown(difference.old), _shown(difference.new)
            lines.append(f"~ {difference.path}: {old} -> {new}")
    return "\n".join(lines)


def _shown(leaf: Leaf) -> str:
    return f"{scalar_text(leaf.value)} ({leaf.place})"


def _same(a: Any, b: Any) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def leaves(composed: ComposedConfig) -> dict[str, Leaf]:
    """Every value of the canonical, resolved config by its dotted path, defaults included.

    A component's own path has its kind and variant as value, such as ``optimizer/adam_w``.
    """
    found: dict[str, Leaf] = {}
    for name, node in composed.tree.value.items():
        if not is_own_entry(name):
            _collect(node, (name,), child_annotation(composed.schema.recipe, name), composed.schema, found)
    _fill(composed.schema.recipe, (), "default", found)
    return {path: leaf for path, leaf in found.items() if leaf.value is not None}


def _collect(node: Node, path: TreePath, annotation: Any, schema: Schema, found: dict[str, Leaf]) -> None:
    name = reference_name(node)
    if name is not None:
        found[dotted(path)] = Leaf(f"${{ref:{name.value}}}", node.place)
    elif is_component(node):
        _collect_component(node, path, schema, found)
    elif isinstance(node.value, dict):
        for key, child in node.value.items():
            _collect(child, (*path, key), child_annotation(annotation, key), schema, found)
        section = bare(annotation)
        if is_section(section):
            _fill(section, path, "default", found)
    elif isinstance(node.value, list) and any(isinstance(item.value, dict | list) for item in node.value):
        for index, child in enumerate(node.value):
            _collect(child, (*path, index), child_annotation(annotation, index), schema, found)
    else:
        value = value_or_question(node)
        found[dotted(path)] = Leaf(_normal(node.plain(), annotation) if value is node else value, node.place)


def _collect_component(node: Node, path: TreePath, schema: Schema, found: dict[str, Leaf]) -> None:
    spec = schema.spec_of(node)
    variant, config = node.value.get(VARIANT_KEY), node.value.get(CONFIG)
    if variant is not None:
        found[dotted(path)] = Leaf(spec.name if spec is not None else variant.plain(), variant.place)
    given = dict(config.value) if config is not None and isinstance(config.value, dict) else {}
    annotations = spec.annotations() if spec is not None else {}
    main_names = {alias: n for n, f in spec.config.model_fields.items() for alias in names_of(n, f)} if spec else {}
    for key, child in given.items():
        _collect(child, (*path, main_names.get(key, key)), annotations.get(key), schema, found)
    if spec is not None:
        _fill(spec.config, path, f"default of {spec.name}", found)


def _fill(model: type[BaseModel], path: TreePath, origin: str, found: dict[str, Leaf]) -> None:
    """Defaults of what is not given, whole or in parts."""
    for default_path, value in _defaults(model, path):
        if not any(p == default_path or p.startswith(f"{default_path}.") for p in found):
            found[default_path] = Leaf(value, Place(origin=origin))


def _defaults(model: type[BaseModel], path: TreePath) -> list[tuple[str, Any]]:
    found = []
    for name, field in model.model_fields.items():
        if field.is_required():
            continue
        default = field.get_default(call_default_factory=True, validated_data={})
        if isinstance(default, BaseModel):
            found += _defaults(type(default), (*path, name))
        elif default not in (None, []):
            found.append((dotted((*path, name)), default.name if isinstance(default, Enum) else default))
    return found


def _normal(value: Any, annotation: Any) -> Any:
    """Spellings of one value as one: an enum's member name, a whole float as it compares."""
    annotation = bare(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return next((m.name for m in annotation if value in (m.name, m.value)), value)
    return value
