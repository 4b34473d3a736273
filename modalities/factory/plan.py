"""Check a canonical tree against the registry and put its components in build order; nothing is built here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from modalities.config.faults import Fault, errors_of
from modalities.config.suggestions import did_you_mean, nearest
from modalities.config.tree import (
    BROKEN,
    COMPONENT_KEY,
    CONFIG,
    PASS_TYPE,
    VARIANT_KEY,
    Node,
    Place,
    TreePath,
    dotted,
    is_component,
    reference_name,
)
from modalities.factory.planned_component import PlannedComponent
from modalities.factory.validation import validate
from modalities.registry.fields import Pending, child_annotation, names_of
from modalities.registry.interfaces import Anything, Interface, IntValue
from modalities.registry.registry import Registry, SameAs, Spec


@dataclass
class Plan:
    """What a recipe needs, checked.

    Args:
        recipe: Schema of the top-level entries.
        roots: The recipe's own entries by field name.
        components: Every component by its path.
        faults: All that is wrong or doubtful.
    """

    recipe: type[BaseModel]
    tree: Node
    roots: dict[str, Any]
    components: dict[TreePath, PlannedComponent]
    faults: list[Fault]

    @property
    def errors(self) -> list[Fault]:
        return errors_of(self.faults)

    def build_order(self) -> list[PlannedComponent]:
        """Needed components, each after what it needs; the order follows the recipe's fields.

        It must be the same on every rank, since process groups are made on the way.
        """
        ordered: dict[TreePath, None] = {}

        def visit(path: TreePath) -> None:
            if path not in ordered:
                for needed in self.components[path].needs:
                    visit(needed)
                ordered[path] = None

        for value in self.roots.values():
            for path in pending_paths(value):
                visit(path)
        return [self.components[path] for path in ordered]


def make_plan(tree: Node, registry: Registry, recipe: type[BaseModel], faults: list[Fault] | None = None) -> Plan:
    """Check the whole tree in one pass.

    Args:
        tree: The canonical tree.
        registry: Where components are looked up.
        recipe: Schema of the top-level entries that a command reads.
        faults: Those found earlier; the plan's are added to them.
    """
    return _Planner(tree, registry, recipe, [] if faults is None else faults).plan()


def pending_paths(value: Any) -> Iterator[TreePath]:
    """Paths of the components that a value stands for or holds."""
    if isinstance(value, Pending):
        yield value.path
    elif isinstance(value, dict):
        for child in value.values():
            yield from pending_paths(child)
    elif isinstance(value, list):
        for child in value:
            yield from pending_paths(child)


class _Planner:
    def __init__(self, tree: Node, registry: Registry, recipe: type[BaseModel], faults: list[Fault]) -> None:
        self.tree, self.registry, self.recipe, self.faults = tree, registry, recipe, faults
        self.components: dict[TreePath, PlannedComponent] = {}
        self.entries: dict[str, Any] = {}
        self.asking: list[tuple[str, Place]] = []
        self.owners: list[PlannedComponent] = []

    def plan(self) -> Plan:
        top = self.tree.value
        fields = self.recipe.model_fields
        wanted = [name for field_name, f in fields.items() for name in names_of(field_name, f) if name in top]
        for name in wanted:
            self._entry(name, top[name].best_place)
        roots = {name: self.entries[name] for name in wanted}
        validate(self.recipe, roots, self.tree, (), "the config", self.registry, self.components, self.faults)
        if self.recipe.model_config.get("extra") != "allow":
            self._unused_entries(wanted)
        return Plan(self.recipe, self.tree, roots, self.components, self.faults)

    def _unused_entries(self, wanted: list[str]) -> None:
        absent = [name for name in self.recipe.model_fields if name not in wanted]
        absent += [name for names in self._missing_references() for name in names]
        for name, node in self.tree.value.items():
            if name in self.entries or str(name).startswith("x-") or name == "user":
                continue
            near = nearest(name, absent, limit=1)
            severity = "error" if near else "warning"
            hint = f"did you mean `{near[0]}`?" if near else "remove it, or refer to it"
            message = f"`{name}` is never used: the run does not read it and nothing refers to it"
            fault = Fault("unused-entry", message, (name,), node.best_place, len(str(name)), [hint], severity=severity)
            self.faults.append(fault)

    def _missing_references(self) -> Iterator[list[str]]:
        for fault in self.faults:
            if fault.code == "unknown-reference":
                yield [fault.message.split("`")[1]]

    def _entry(self, name: str, asked_at: Place) -> Any:
        """The value of a top-level entry, visited once however often it is referred to."""
        if name in self.entries:
            return self.entries[name]
        asking = [asked for asked, _ in self.asking]
        if name in asking:
            self._report_cycle(self.asking[asking.index(name) :], asked_at)
            return BROKEN
        self.asking.append((name, asked_at))
        owners, self.owners = self.owners, []
        value = self._visit(self.tree.value[name], (name,), child_annotation(self.recipe, name))
        self.owners = owners
        self.asking.pop()
        self.entries[name] = value
        return value

    def _report_cycle(self, loop: list[tuple[str, Place]], closed_at: Place) -> None:
        names = [name for name, _ in loop]
        places = [place for _, place in loop[1:]] + [closed_at]
        following = [*names[1:], names[0]]
        related = [(f"`{a}` needs `{b}` here", place) for a, b, place in zip(names, following, places, strict=True)]
        message = f"components need each other: {' -> '.join([*names, names[0]])}"
        self.faults.append(Fault("cycle", message, (names[0],), closed_at, related=related))

    def _visit(self, node: Node, path: TreePath, annotation: Any) -> Any:
        name_node = reference_name(node)
        if name_node is not None:
            return self._reference(name_node, node, path)
        if is_component(node):
            return self._component(node, path)
        if isinstance(node.value, dict):
            return {k: self._visit(c, (*path, k), child_annotation(annotation, k)) for k, c in node.value.items()}
        if isinstance(node.value, list):
            return [self._visit(c, (*path, i), child_annotation(annotation, i)) for i, c in enumerate(node.value)]
        return node.value

    def _reference(self, name_node: Node, node: Node, path: TreePath) -> Any:
        name = name_node.value
        pass_type = node.value.get(PASS_TYPE)
        if pass_type is not None and str(pass_type.value).upper() not in ("BY_REFERENCE", "BY_VALUE"):
            message = f"`{pass_type.value}` is no pass_type"
            self.faults.append(Fault("pass-type", message, path, pass_type.place, 1, ["write BY_REFERENCE"]))
        if not isinstance(name, str) or name not in self.tree.value:
            hint = did_you_mean(name, self.tree.value, "entries")
            message = f"no entry `{name}` to refer to"
            self.faults.append(Fault("unknown-reference", message, path, name_node.place, len(str(name)), [hint]))
            return BROKEN
        value = self._entry(name, name_node.place)
        if self.owners:
            self.owners[-1].needs += pending_paths(value)
        return value

    def _component(self, node: Node, path: TreePath) -> Any:
        spec = self._spec(node, path)
        if spec is None:
            return BROKEN
        config = node.value.get(CONFIG) or Node({}, node.place)
        if config.value is None:
            config = Node({}, config.place, config.key_place)
        if not isinstance(config.value, dict):
            message = f"`config` of {spec.name} must be a mapping of fields"
            self.faults.append(Fault("bad-value", message, (*path, CONFIG), config.place))
            return BROKEN
        for key in set(node.value) - {COMPONENT_KEY, VARIANT_KEY, CONFIG}:
            hint = f"move `{key}` into `config:`"
            message = f"`{key}` stands beside `config:`"
            place = node.value[key].best_place
            self.faults.append(Fault("mixed-form", message, (*path, key), place, len(str(key)), [hint]))
        component = PlannedComponent(path, spec, node)
        self.components[path] = component
        if self.owners:
            self.owners[-1].needs.append(path)
        self.owners.append(component)
        annotations = spec.annotations()
        for key, child in config.value.items():
            component.fields[key] = self._visit(child, (*path, CONFIG, key), annotations.get(key))
        self.owners.pop()
        component.provides = _provided(spec, component.fields)
        self._warn_of_copy(node, component)
        inside = (*path, CONFIG)
        validate(spec.config, component.fields, config, inside, spec.name, self.registry, self.components, self.faults)
        return Pending(component.provides, path, f"`{dotted(path)}` = {spec.name}")

    def _spec(self, node: Node, path: TreePath) -> Spec | None:
        kind, variant = node.value.get(COMPONENT_KEY), node.value.get(VARIANT_KEY)
        if kind is None or variant is None:
            absent = COMPONENT_KEY if kind is None else VARIANT_KEY
            hint = ""
            if kind is not None:
                hint = f"variants of {kind.value}: {', '.join(self.registry.variants(str(kind.value)))}"
            self.faults.append(Fault("no-key", f"the component needs a `{absent}`", path, node.best_place, 1, [hint]))
            return None
        if not isinstance(kind.value, str) or kind.value not in self.registry.kinds():
            hint = did_you_mean(kind.plain(), self.registry.kinds(), "component keys")
            message = f"there is no component_key `{kind.plain()}`"
            span = len(str(kind.value))
            self.faults.append(Fault("unknown-kind", message, (*path, COMPONENT_KEY), kind.place, span, [hint]))
            return None
        spec = self.registry.get(kind.value, variant.value) if isinstance(variant.value, str) else None
        if spec is None:
            hint = did_you_mean(variant.plain(), self.registry.variants(kind.value), f"variants of {kind.value}")
            message = f"`{kind.value}` has no variant `{variant.plain()}`"
            span = len(str(variant.value))
            self.faults.append(Fault("unknown-variant", message, (*path, VARIANT_KEY), variant.place, span, [hint]))
        return spec

    def _warn_of_copy(self, node: Node, component: PlannedComponent) -> None:
        """``${name}`` on a component makes a second one, which is right for numbers and seldom for models."""
        if not node.via or issubclass(component.provides, IntValue):
            return
        copied = node.via[0][0]
        message = f"`{copied}` copies the component: {component.spec.name} is built once more, apart from the first"
        hint = "to share one instance, refer to it by instance_key and pass_type: BY_REFERENCE"
        related = [("the original", node.via[-1][1])]
        self.faults.append(
            Fault("copied-component", message, component.path, node.place, len(copied), [hint], related, "warning")
        )


def _provided(spec: Spec, fields: dict[str, Any]) -> type[Interface]:
    if not isinstance(spec.provides, SameAs):
        return spec.provides
    value = fields.get(spec.provides.field)
    return value.provides if isinstance(value, Pending) else Anything
