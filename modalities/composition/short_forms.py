"""Short forms to the canonical form: every component with its three keys, every reference with its two.

=============================================  ================================================================
short                                          canonical
=============================================  ================================================================
``checkpoint_saving: dcp``                     ``{component_key: checkpoint_saving, variant_key: dcp, config: {}}``
``optimizer: {variant_key: adam_w, lr: 1e-4}`` ``{component_key: optimizer, variant_key: adam_w, config: {lr: …}}``
``model: ${ref:gpt}``                          ``{instance_key: gpt, pass_type: BY_REFERENCE}``
=============================================  ================================================================
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from typing import Any

from modalities.composition.schema import Schema, is_own_entry
from modalities.config.faults import Fault
from modalities.config.suggestions import did_you_mean
from modalities.config.tree import (
    BROKEN,
    COMPONENT_KEY,
    CONFIG,
    INSTANCE_KEY,
    PASS_TYPE,
    VARIANT_KEY,
    Node,
    Place,
    TreePath,
    is_component,
    reference_name,
)
from modalities.registry.fields import child_annotation, names_of, slots_of
from modalities.registry.interfaces import Interface
from modalities.registry.spec import Spec

REFERENCE = re.compile(r"\$\{\s*ref:\s*([^{}]*?)\s*\}")
_KEYS = (COMPONENT_KEY, VARIANT_KEY, CONFIG)


def expand(root: Node, schema: Schema, faults: list[Fault]) -> Node:
    """The tree with every short form written out; what is canonical already stays as it is.

    Args:
        root: The tree as written.
        schema: Says what may stand where.
        faults: Receives names that fit no slot, forms that are mixed, and older names (as warnings).
    """
    expander = ShortForms(schema, faults, list(root.value))
    children = {
        name: child if is_own_entry(name) else expander.expand(child, child_annotation(schema.recipe, name), (name,))
        for name, child in root.value.items()
    }
    return replace(root, value=children)


class ShortForms:
    """Expands single values, for files and for overrides alike."""

    def __init__(self, schema: Schema, faults: list[Fault], entries: Collection[Any] = ()) -> None:
        self.schema, self.faults, self.entries = schema, faults, entries

    def expand(self, node: Node, annotation: Any, path: TreePath) -> Node:
        """The canonical form of a value.

        Args:
            node: The value as written.
            annotation: What the place takes, if it is known.
            path: The place.
        """
        if isinstance(node.value, str):
            return self._text(node, annotation, path)
        if is_component(node):
            return self._component(node, annotation, path)
        if isinstance(node.value, dict) and reference_name(node) is None:
            if slots_of(annotation)[0] and INSTANCE_KEY not in node.value:
                return self._without_variant(node, annotation, path)
            children = {k: self.expand(c, child_annotation(annotation, k), (*path, k)) for k, c in node.value.items()}
            return replace(node, value=children)
        if isinstance(node.value, list):
            items = [self.expand(c, child_annotation(annotation, i), (*path, i)) for i, c in enumerate(node.value)]
            return replace(node, value=items)
        return node

    def choose(self, variant: Node, interfaces: tuple[type[Interface], ...], path: TreePath) -> Spec | None:
        """The component that a variant's name means in a slot; a fault if there is none or more than one."""
        fitting = self.schema.registry.fitting(interfaces)
        names = {str(variant.value)}
        for kind in {spec.kind for spec in fitting}:
            if (present := self.schema.registry.renamed_variant(kind, str(variant.value))) is not None:
                self._warn_of_rename(str(variant.value), present, path, variant.place)
                names.add(present)
        found = [spec for spec in fitting if spec.variant in names]
        if len(found) == 1:
            return found[0]
        span = len(str(variant.value))
        if found:
            kinds = " or ".join(spec.kind for spec in found)
            hint = f"write {{component_key: {found[0].kind}, variant_key: {variant.value}}}"
            message = f"`{variant.value}` is a variant of {kinds}"
            self.faults.append(Fault("ambiguous-variant", message, path, variant.place, span, [hint]))
            return None
        wanted = " or ".join(interface.__name__ for interface in interfaces)
        hint = did_you_mean(variant.value, [spec.variant for spec in fitting if spec.is_available], "variants")
        if variant.value in self.entries:
            hint = f"to refer to the entry of that name, write ${{ref:{variant.value}}}"
        message = f"no variant `{variant.value}` gives the {wanted} that is needed here"
        self.faults.append(Fault("unknown-variant", message, path, variant.place, span, [hint]))
        return None

    def _without_variant(self, node: Node, annotation: Any, path: TreePath) -> Node:
        fitting = self.schema.registry.fitting(slots_of(annotation)[0])
        variants = sorted({spec.variant for spec in fitting if spec.is_available})
        message = f"`{path[-1]}` is a component, and names no `{VARIANT_KEY}`"
        hint = f"variants: {', '.join(variants[:12])}{', …' if len(variants) > 12 else ''}"
        self.faults.append(Fault("no-variant", message, path, node.best_place, len(str(path[-1])), [hint]))
        return replace(node, value=BROKEN)

    def _text(self, node: Node, annotation: Any, path: TreePath) -> Node:
        if "${" in node.value:
            return self._reference(node, path)
        interfaces, _ = slots_of(annotation)
        if not interfaces:
            return node
        spec = self.choose(node, interfaces, path)
        return replace(node, value=BROKEN) if spec is None else component_node(spec, node.place, node.key_place)

    def _reference(self, node: Node, path: TreePath) -> Node:
        whole = REFERENCE.fullmatch(node.value)
        if whole is not None:
            name = Node(whole[1], node.place, node.place)
            by_reference = Node("BY_REFERENCE", node.place, node.place)
            return replace(node, value={INSTANCE_KEY: name, PASS_TYPE: by_reference}, raw=None)
        if REFERENCE.search(node.value):
            message = f"`{node.value}` mixes a reference with text: a component is no text"
            hint = "a reference stands alone: ${ref:name}"
            self.faults.append(Fault("reference-in-text", message, path, node.place, len(node.value), [hint]))
            return replace(node, value=BROKEN)
        return node

    def _component(self, node: Node, annotation: Any, path: TreePath) -> Node:
        entry = dict(node.value)
        spec = self._understand_keys(entry, annotation, path)
        if spec is BROKEN:
            return replace(node, value=BROKEN)
        flat = {key: entry.pop(key) for key in list(entry) if key not in _KEYS}
        config = entry.get(CONFIG)
        if config is None or config.value is None:
            config = Node(flat, config.place if config is not None else node.place, config and config.key_place)
        elif flat:
            self._refuse_mixed_form(flat, config, path)
        if isinstance(config.value, dict):
            config = replace(config, value=self._fields(config.value, spec, path))
        return replace(node, value={**entry, CONFIG: config})

    def _understand_keys(self, entry: dict[Any, Node], annotation: Any, path: TreePath) -> Any:
        """Complete the two keys of a component; its spec, None if the plan has to judge, BROKEN if a fault is told."""
        kind, variant = entry.get(COMPONENT_KEY), entry.get(VARIANT_KEY)
        interfaces, _ = slots_of(annotation)
        if variant is None or not isinstance(variant.value, str) or "${" in variant.value:
            return None
        if kind is None:
            if not interfaces:
                return None
            chosen = self.choose(variant, interfaces, (*path, VARIANT_KEY))
            if chosen is None:
                return BROKEN
            entry[COMPONENT_KEY] = Node(chosen.kind, variant.place)
            entry[VARIANT_KEY] = replace(variant, value=chosen.variant)
            keys = {COMPONENT_KEY: entry.pop(COMPONENT_KEY), VARIANT_KEY: entry.pop(VARIANT_KEY)}
            rest = dict(entry)
            entry.clear()
            entry.update(keys | rest)
            return chosen
        present = self.schema.registry.renamed_variant(str(kind.value), variant.value)
        if present is not None:
            self._warn_of_rename(variant.value, present, (*path, VARIANT_KEY), variant.place)
            entry[VARIANT_KEY] = replace(variant, value=present)
            return self.schema.registry.get(str(kind.value), present)
        return self.schema.registry.get(str(kind.value), variant.value)

    def _refuse_mixed_form(self, flat: dict[Any, Node], config: Node, path: TreePath) -> None:
        for key, child in flat.items():
            hint = f"move `{key}` into `config:`, or leave `config:` out"
            message = f"`{key}` stands beside `config:`"
            place, beside = child.best_place, [("`config:` is here", config.best_place)]
            self.faults.append(Fault("mixed-form", message, (*path, key), place, len(str(key)), [hint], beside))

    def _fields(self, given: dict[Any, Node], spec: Spec | None, path: TreePath) -> dict[Any, Node]:
        annotations = spec.annotations() if spec is not None else {}
        fields: dict[Any, Node] = {}
        for key, child in given.items():
            name = key
            inside = (*path, CONFIG, key)
            if spec is not None and key not in annotations:
                if key in spec.removed:
                    message = f"{spec.name} has no field `{key}` any more: {spec.removed[key]}"
                    hint = "leave it out, or let `modalities config upgrade` mend the file"
                    self._warn("removed-field", message, inside, child.best_place, len(str(key)), hint)
                    continue
                rename = spec.renamed.get(key)
                if rename is not None and rename.to not in given:
                    self._warn_of_rename(str(key), rename.to, inside, child.best_place)
                    name, child = rename.to, rename.convert(child) if rename.convert is not None else child
            fields[name] = self.expand(child, annotations.get(name), (*path, CONFIG, name))
        if spec is not None:
            self._refuse_two_spellings(fields, spec, path)
        return fields

    def _refuse_two_spellings(self, fields: dict[Any, Node], spec: Spec, path: TreePath) -> None:
        for field_name, field in spec.config.model_fields.items():
            given = [spelling for spelling in names_of(field_name, field) if spelling in fields]
            for first, other in pairwise(given):
                message = f"`{first}` and `{other}` of {spec.name} are the same field"
                place = fields[other].best_place
                related = [("the other", fields[first].best_place)]
                self.faults.append(
                    Fault("same-field", message, (*path, CONFIG, other), place, len(other), ["leave one out"], related)
                )
                del fields[other]

    def _warn_of_rename(self, old: str, new: str, path: TreePath, place: Place) -> None:
        hint = f"write `{new}`, or let `modalities config upgrade` mend the file"
        self._warn("renamed", f"`{old}` is now called `{new}`", path, place, len(old), hint)

    def _warn(self, code: str, message: str, path: TreePath, place: Place, span: int, hint: str) -> None:
        self.faults.append(Fault(code, message, path, place, span, [hint], severity="warning"))


def component_node(spec: Spec, place: Place, key_place: Place | None, fields: dict[Any, Node] | None = None) -> Node:
    """The canonical entry of a component, all of it set at one place."""
    entry = {
        COMPONENT_KEY: Node(spec.kind, place),
        VARIANT_KEY: Node(spec.variant, place),
        CONFIG: Node(fields or {}, place),
    }
    return Node(entry, place, key_place)
