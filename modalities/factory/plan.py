"""Check a canonical tree against the registry and put its components in build order; nothing is built here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from modalities.composition.schema import is_own_entry
from modalities.config.faults import Fault, errors_of, without_consequences
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
from modalities.factory.rules import check_names, check_rules
from modalities.factory.validation import THE_CONFIG, validate
from modalities.registry.fields import Pending, annotations_of, child_annotation, names_of, slots_of
from modalities.registry.interfaces import Anything, Interface, IntValue
from modalities.registry.registry import Registry
from modalities.registry.spec import SameAs, Spec

NEAR_MISS = 0.8
"""How like a slot's name an unused entry must be to be a slip of the pen rather than a spare part."""


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

    @property
    def used_entries(self) -> list[str]:
        """Top-level entries that the recipe reads or something refers to, in file order."""
        return list(self.roots) + [n for n in self.tree.value if n not in self.roots and (n,) in self.components]

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


def make_plan(
    tree: Node,
    registry: Registry,
    recipe: type[BaseModel],
    faults: list[Fault] | None = None,
    reads: frozenset[str] = frozenset(),
) -> Plan:
    """Check the whole tree in one pass.

    Args:
        tree: The canonical tree.
        registry: Where components are looked up.
        recipe: Schema of the top-level entries that a command reads.
        faults: Those found earlier; the plan's are added to them.
        reads: Dotted paths that interpolations ask for: what is read so is used.
    """
    return _Planner(tree, registry, recipe, [] if faults is None else faults, reads).plan()


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
    def __init__(
        self, tree: Node, registry: Registry, recipe: type[BaseModel], faults: list[Fault], reads: frozenset[str]
    ) -> None:
        self.tree, self.registry, self.recipe, self.faults, self.reads = tree, registry, recipe, faults, reads
        self.components: dict[TreePath, PlannedComponent] = {}
        self.visited: dict[TreePath, Any] = {}
        self.asking: list[tuple[TreePath, Place]] = []
        self.owners: list[PlannedComponent] = []

    def plan(self) -> Plan:
        top = self.tree.value
        fields = self.recipe.model_fields
        wanted = [name for field_name, f in fields.items() for name in names_of(field_name, f) if name in top]
        reads_all = self.recipe.model_config.get("extra") == "allow"
        if reads_all and not fields:
            wanted = [name for name in top if not is_own_entry(name)]
        for name in wanted:
            self._at((name,), top[name], child_annotation(self.recipe, name), top[name].best_place)
        roots = {name: self.visited[(name,)] for name in wanted}
        faults: list[Fault] = []
        validate(self.recipe, roots, self.tree, (), THE_CONFIG, self.registry, self.components, faults)
        self.faults += [fault for fault in faults if not self._is_read(fault)]
        used = set(self.visited)
        if errors_of(self.faults):
            self._visit_the_rest()
        for component in list(self.components.values()):
            self._check_rules(component)
        check_rules(self.recipe, self.tree, (), "", self.tree, self.components, self.faults)
        if not reads_all:
            self._unused_entries(used)
        self.faults[:] = without_consequences(self.faults)
        return Plan(self.recipe, self.tree, roots, self.components, self.faults)

    def _check_rules(self, component: PlannedComponent) -> None:
        spec, config = component.spec, component.node.value.get(CONFIG)
        if config is not None and isinstance(config.value, dict):
            inside = (*component.path, CONFIG)
            check_rules(spec.config, config, inside, spec.name, self.tree, self.components, self.faults)
        check_names(component, self.components, self.faults)

    def _is_read(self, fault: Fault) -> bool:
        """Whether an unknown name of a section is one of the user's own, which interpolations ask for."""
        name = dotted(fault.path)
        return fault.code == "unknown-field" and any(read == name or read.startswith(f"{name}.") for read in self.reads)

    def _visit_the_rest(self) -> None:
        """Check entries that nothing reads: it may be a mistake elsewhere that keeps them from being read."""
        before = len(self.faults)
        for name, node in self.tree.value.items():
            if (name,) not in self.visited and not is_own_entry(name):
                self._at((name,), node, child_annotation(self.recipe, name), node.best_place)
        self.faults[before:] = [fault for fault in self.faults[before:] if fault.code != "not-available"]

    def _unused_entries(self, used: set[TreePath]) -> None:
        absent = [name for name in annotations_of(self.recipe) if name not in self.tree.value]
        missed = [name for names in self._missing_references() for name in names]
        is_fine = not errors_of(self.faults)
        read = {name.partition(".")[0] for name in self.reads}
        for name, node in self.tree.value.items():
            if (name,) in used or name in read or is_own_entry(name):
                continue
            if nearest(name, missed, limit=1, cutoff=NEAR_MISS):
                continue  # the reference that misses it is told
            near = nearest(name, absent, limit=1, cutoff=NEAR_MISS)
            if not near and not is_fine:
                continue  # what would use it may be what is wrong
            severity = "error" if near else "warning"
            hint = f"did you mean `{near[0]}`?" if near else "remove it, or refer to it"
            message = f"`{name}` is never used: the run does not read it and nothing refers to it"
            fault = Fault("unused-entry", message, (name,), node.best_place, len(str(name)), [hint], severity=severity)
            self.faults.append(fault)

    def _missing_references(self) -> Iterator[list[str]]:
        for fault in self.faults:
            if fault.code == "unknown-reference":
                yield [fault.message.split("`")[1]]

    def _at(self, path: TreePath, node: Node, annotation: Any, asked_at: Place) -> Any:
        """The value of an entry or a component, visited once however often it is referred to."""
        if path in self.visited:
            return self.visited[path]
        asking = [asked for asked, _ in self.asking]
        if path in asking:
            self._report_cycle(self.asking[asking.index(path) :], asked_at)
            return BROKEN
        self.asking.append((path, asked_at))
        owners, self.owners = self.owners, []
        value = self._component(node, path, annotation) if is_component(node) else self._plain(node, path, annotation)
        self.owners = owners
        self.asking.pop()
        self.visited[path] = value
        return value

    def _report_cycle(self, loop: list[tuple[TreePath, Place]], closed_at: Place) -> None:
        names = [dotted(tuple(key for key in path if key != CONFIG)) for path, _ in loop]
        places = [place for _, place in loop[1:]] + [closed_at]
        following = [*names[1:], names[0]]
        related = [(f"`{a}` needs `{b}` here", place) for a, b, place in zip(names, following, places, strict=True)]
        message = f"components need each other: {' -> '.join([*names, names[0]])}"
        self.faults.append(Fault("cycle", message, loop[0][0], closed_at, related=related))

    def _visit(self, node: Node, path: TreePath, annotation: Any) -> Any:
        if not is_component(node):
            return self._plain(node, path, annotation)
        value = self._at(path, node, annotation, node.best_place)
        if self.owners and isinstance(value, Pending):
            self.owners[-1].needs.append(value.path)
        return value

    def _plain(self, node: Node, path: TreePath, annotation: Any) -> Any:
        name_node = reference_name(node)
        if name_node is not None:
            return self._reference(name_node, node, path)
        if isinstance(node.value, dict):
            return {k: self._visit(c, (*path, k), child_annotation(annotation, k)) for k, c in node.value.items()}
        if isinstance(node.value, list):
            return [self._visit(c, (*path, i), child_annotation(annotation, i)) for i, c in enumerate(node.value)]
        return node.value

    def _reference(self, name_node: Node, node: Node, path: TreePath) -> Any:
        pass_type = node.value.get(PASS_TYPE)
        if pass_type is not None and str(pass_type.value).upper() not in ("BY_REFERENCE", "BY_VALUE"):
            message = f"`{pass_type.value}` is no pass_type"
            self.faults.append(Fault("pass-type", message, path, pass_type.place, 1, ["write BY_REFERENCE"]))
        target = self._referred(name_node, path)
        if target is None:
            return BROKEN
        node, target_path, annotation = target
        value = self._at(target_path, node, annotation, name_node.place)
        if self.owners:
            self.owners[-1].needs += pending_paths(value)
        return value

    def _referred(self, name_node: Node, path: TreePath) -> tuple[Node, TreePath, Any] | None:
        """What a name refers to: an entry, or what stands in an entry's plain mappings and lists."""
        name = name_node.value
        parts = name.split(".") if isinstance(name, str) else [name]
        node, annotation = self.tree, self.recipe
        target: TreePath = ()
        span = len(str(name))
        for part in parts:
            if is_component(node):
                message = f"`{name}` is a part of `{dotted(target)}`, and parts of components are not shared"
                hint = f"give `{part}` an entry of its own, and refer to it from both places"
                self.faults.append(Fault("reference-inside", message, path, name_node.place, span, [hint]))
                return None
            key: Any = int(part) if isinstance(node.value, list) and str(part).isdigit() else part
            child = node.get((key,)) if isinstance(key, str | int) else None
            if child is None:
                if node.value is not BROKEN:
                    names = node.value if isinstance(node.value, dict) else ()
                    hint = did_you_mean(part, names, f"names in {dotted(target)}" if target else "entries")
                    message = f"no entry `{name}` to refer to"
                    self.faults.append(Fault("unknown-reference", message, path, name_node.place, span, [hint]))
                return None
            node, annotation, target = child, child_annotation(annotation, key), (*target, key)
        return node, target, annotation

    def _component(self, node: Node, path: TreePath, annotation: Any) -> Any:
        spec = self._spec(node, path, annotation)
        if spec is None:
            self._visit_parts(node, path)
            return BROKEN
        if not spec.is_available:
            message = f"{spec.name} is known, but not yet available: {spec.summary[:1].lower()}{spec.summary[1:]}"
            place = node.value[VARIANT_KEY].place
            self.faults.append(Fault("not-available", message, (*path, VARIANT_KEY), place, len(spec.variant)))
        config = node.value.get(CONFIG) or Node({}, node.place)
        if config.value is None:
            config = Node({}, config.place, config.key_place)
        if not isinstance(config.value, dict):
            message = f"`config` of {spec.name} must be a mapping of fields"
            self.faults.append(Fault("bad-value", message, (*path, CONFIG), config.place))
            return BROKEN
        component = PlannedComponent(path, spec, node)
        self.components[path] = component
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

    def _visit_parts(self, node: Node, path: TreePath) -> None:
        """Check what stands inside a component that is not understood itself."""
        config = node.value.get(CONFIG)
        if config is not None and isinstance(config.value, dict):
            for key, child in config.value.items():
                self._visit(child, (*path, CONFIG, key), None)

    def _spec(self, node: Node, path: TreePath, annotation: Any) -> Spec | None:
        kind, variant = node.value.get(COMPONENT_KEY), node.value.get(VARIANT_KEY)
        if kind is None or variant is None:
            absent = COMPONENT_KEY if kind is None else VARIANT_KEY
            hint = ""
            if kind is not None:
                hint = f"variants of {kind.value}: {', '.join(self.registry.variants(str(kind.value)))}"
            elif variant is not None:
                kinds = sorted({spec.kind for spec in self.registry if spec.variant == variant.value})
                hint = f"write component_key: {' or '.join(kinds)}" if kinds else "an entry that is no slot names it"
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
        hint = f"to share one instance, refer to it: {copied.replace('${', '${ref:')}"
        related = [("the original", node.via[-1][1])]
        self.faults.append(
            Fault("copied-component", message, component.path, node.place, len(copied), [hint], related, "warning")
        )


def _provided(spec: Spec, fields: dict[str, Any]) -> type[Interface]:
    if not isinstance(spec.provides, SameAs):
        return spec.provides
    value = fields.get(spec.provides.field)
    wanted, _ = slots_of(spec.annotations()[spec.provides.field])
    fits = isinstance(value, Pending) and issubclass(value.provides, wanted)
    return value.provides if fits and isinstance(value, Pending) else Anything
