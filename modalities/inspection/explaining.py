"""One value of a config: what it is, who set it, what it means, who uses it."""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo

from modalities.composition.compose import ComposedConfig
from modalities.composition.schema import Schema
from modalities.config.suggestions import did_you_mean
from modalities.config.tree import (
    BROKEN,
    CONFIG,
    Node,
    TreePath,
    dotted,
    reference_name,
)
from modalities.config.yaml_writer import scalar_text
from modalities.exceptions import UserError
from modalities.factory.plan import Plan
from modalities.inspection.showing import is_by_default
from modalities.registry.describing import default_text, field_type_text
from modalities.registry.fields import bare, names_of, slots_of

_MAX_VALUE = 100


def explain(composed: ComposedConfig, plan: Plan, dotted_path: str) -> str:
    """A few lines about the value at a path, whether it is given or not.

    Args:
        composed: The config.
        plan: Its plan, which knows who needs whom.
        dotted_path: In any of the spellings that overrides take.

    Raises:
        UserError: Nothing stands there, and no schema has anything to say about it.
    """
    schema, tree = composed.schema, composed.tree
    path = schema.locate(tree, dotted_path)
    node = tree.get(path)
    field = _field_at(schema, tree, path)
    if node is None and field is None:
        parent = path[:-2] if path[-2:-1] == (CONFIG,) else path[:-1]
        hint = did_you_mean(path[-1], schema.names_below(tree, parent), "names there")
        raise UserError(f"there is no `{dotted_path}` in the config\n  help: {hint}")
    rows: list[tuple[str, str]] = []
    if node is not None:
        rows += _about_value(composed, path, node)
    rows += _about_field(schema, tree, path, node, field)
    if node is not None:
        rows += _about_use(composed, plan, path)
    width = max(len(name) for name, _ in rows)
    shown = dotted(tuple(key for key in path if key != CONFIG))
    return "\n".join([shown, *(f"  {name:<{width}}  {text}" for name, text in rows)])


def _about_value(composed: ComposedConfig, path: TreePath, node: Node) -> list[tuple[str, str]]:
    rows = []
    spec = composed.schema.spec_of(node)
    target = reference_name(node)
    if spec is not None:
        rows.append(("is", f"{spec.name}: {spec.summary}"))
    elif target is not None:
        rows.append(("value", f"${{ref:{target.value}}}, shared"))
    else:
        text = "wrong; see `modalities check`" if node.value is BROKEN else scalar_text(node.plain())
        rows.append(("value", text if len(text) <= _MAX_VALUE else text[:_MAX_VALUE] + "…"))
    written = composed.unresolved.get(path)
    origin = written if written is not None else node
    rows.append(("set by", str(origin.best_place)))
    if node.via:
        chain = [f"{expression}  ->  {place}" for expression, place in node.via]
        rows += [("through" if index == 0 else "", step) for index, step in enumerate(chain)]
    return rows


def _about_field(
    schema: Schema, tree: Node, path: TreePath, node: Node | None, field: FieldInfo | None
) -> list[tuple[str, str]]:
    rows = []
    owner = tree.get(path[:-2]) if path[-2:-1] == (CONFIG,) else None
    owner_spec = schema.spec_of(owner) if owner is not None else None
    if owner_spec is not None:
        rows.append(("field of", f"{owner_spec.name}: {owner_spec.summary}"))
    if field is None:
        return rows
    rows += [("type", field_type_text(field)), ("default", default_text(field))]
    if field.description:
        rows.append(("meaning", field.description))
    interfaces, _ = slots_of(schema.annotation_at(tree, path))
    if interfaces:
        options = sorted({spec.variant for spec in schema.registry.fitting(interfaces) if spec.is_available})
        rows.append(("variants", ", ".join(options)))
    return rows


def _about_use(composed: ComposedConfig, plan: Plan, path: TreePath) -> list[tuple[str, str]]:
    readers = []
    for where, leaf in composed.unresolved.leaves():
        if isinstance(leaf.value, str) and "${" in leaf.value:
            asked = [_canonical(composed, text) for text in composed.paths_in(leaf.value)]
            if any(target[: len(path)] == path for target in asked) and not is_by_default(leaf):
                readers.append(dotted(tuple(key for key in where if key != CONFIG)))
            elif any(target == path for target in asked):
                readers.append(f"{dotted(tuple(key for key in where if key != CONFIG))} (by default)")
    readers += [dotted(c.path).replace(f".{CONFIG}.", ".") for c in plan.components.values() if path in c.needs]
    if readers:
        return [("used by", ", ".join(dict.fromkeys(readers)))]
    is_entry = len(path) == 1 and path[0] not in plan.roots and path not in plan.components
    return [("used by", "nothing")] if is_entry else []


def _canonical(composed: ComposedConfig, text: str) -> TreePath:
    return composed.schema.locate(composed.tree, text)


def _field_at(schema: Schema, tree: Node, path: TreePath) -> FieldInfo | None:
    """The declared field at a path, of a component, of the recipe or of a section in it."""
    owner: Any = schema.recipe
    name = path[-1]
    if path[-2:-1] == (CONFIG,):
        spec = schema.spec_of(tree.get(path[:-2]) or Node({}, tree.place))
        owner = spec.config if spec is not None else None
    elif len(path) > 1:
        owner = schema.annotation_at(tree, path[:-1])
        owner = bare(owner)
    fields: dict[str, FieldInfo] = getattr(owner, "model_fields", {})
    return next((f for field_name, f in fields.items() if name in names_of(field_name, f)), None)
