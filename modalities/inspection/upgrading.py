"""Rewrite a file in today's short form: text edits at the places that the tree knows, so that comments stay."""

from __future__ import annotations

import re
import tempfile
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from modalities.composition.compose import ComposedConfig
from modalities.composition.schema import is_own_entry
from modalities.composition.short_forms import expand
from modalities.config.faults import Fault, raise_on_errors
from modalities.config.tree import (
    COMPONENT_KEY,
    CONFIG,
    INSTANCE_KEY,
    PASS_TYPE,
    VARIANT_KEY,
    Node,
)
from modalities.config.yaml_loader import load_yaml
from modalities.exceptions import UserError
from modalities.registry.fields import child_annotation, slots_of
from modalities.registry.spec import Spec

_KEYS = (COMPONENT_KEY, VARIANT_KEY, CONFIG)

_BEYOND_UPGRADING = ("mixed-form", "same-field", "duplicate-key", "yaml-syntax", "yaml-merge", "yaml-key")
"""Faults of a file whose meaning is in doubt."""


def upgrade(composed: ComposedConfig, file: Path) -> str:
    """The file's text in the short form, comments and layout kept.

    Args:
        composed: The config, of this file alone.
        file: The file.

    Raises:
        ConfigError: It is not clear what the file means.
        UserError: The file is no valid YAML, or the result would not mean the same; nothing is written.
    """
    text = file.read_text(encoding="utf-8-sig")
    raise_on_errors(fault for fault in composed.faults if fault.code in _BEYOND_UPGRADING)
    faults: list[Fault] = []
    before = load_yaml(file, faults)
    document = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(document, yaml.MappingNode) or any(fault.severity == "error" for fault in faults):
        raise UserError(f"{file} is no valid YAML: `modalities check` says where; mend that first")
    upgraded = _Upgrader(composed, text).upgrade(document)
    after = _parsed(upgraded, file)
    if _meaning(before, composed) != _meaning(after, composed):
        raise UserError(
            f"{file} is written in a way that cannot be upgraded without changing its meaning (YAML anchors, or several "
            "entries on one line); write it in block style, or upgrade it by hand"
        )
    return upgraded


def _parsed(text: str, file: Path) -> Node:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file.name
        copy.write_text(text, encoding="utf-8")
        return load_yaml(copy, [])


def _meaning(root: Node, composed: ComposedConfig) -> Any:
    """The canonical tree in plain Python, interpolations as they are written."""
    root.value.pop("imports", None)
    return expand(root, composed.schema, []).plain()


@dataclass(frozen=True)
class _Edit:
    """Replace text[start:end]; a dedent gives way to what changes the same lines otherwise."""

    start: int
    end: int
    text: str
    is_dedent: bool = False


class _Upgrader:
    def __init__(self, composed: ComposedConfig, text: str) -> None:
        self.schema, self.text = composed.schema, text
        self.edits: list[_Edit] = []
        self.anchored: set[int] = set()

    def upgrade(self, document: yaml.MappingNode) -> str:
        counts: dict[int, int] = {}
        _count(document, counts)
        self.anchored = {key for key, number in counts.items() if number > 1}
        for key, value in document.value:
            if not is_own_entry(key.value) and key.value != "defaults":
                self._visit(value, child_annotation(self.schema.recipe, key.value))
        text = self.text
        for edit in sorted(self._without_clashes(), key=lambda e: e.start, reverse=True):
            text = text[: edit.start] + edit.text + text[edit.end :]
        return text

    def _without_clashes(self) -> list[_Edit]:
        others = sorted((e for e in self.edits if not e.is_dedent), key=lambda e: e.start)
        starts = [e.start for e in others]

        def is_covered(edit: _Edit) -> bool:
            index = bisect_right(starts, edit.start) - 1
            return index >= 0 and edit.start < others[index].end

        return [e for e in self.edits if not e.is_dedent or not is_covered(e)]

    def _visit(self, node: yaml.Node, annotation: Any) -> None:
        if id(node) in self.anchored:
            return
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._visit(item, child_annotation(annotation, index))
        if not isinstance(node, yaml.MappingNode):
            return
        entry = {key.value: (key, value) for key, value in node.value}
        if INSTANCE_KEY in entry and set(entry) <= {INSTANCE_KEY, PASS_TYPE}:
            self._shorten_reference(node, entry[INSTANCE_KEY][1])
        elif VARIANT_KEY in entry and isinstance(entry[VARIANT_KEY][1], yaml.ScalarNode):
            self._shorten_component(node, entry, annotation)
        else:
            for key, value in node.value:
                self._visit(value, child_annotation(annotation, key.value))

    def _shorten_reference(self, node: yaml.MappingNode, name: yaml.Node) -> None:
        start, end = node.start_mark.index, self._end_of(node)
        inside_flow = self._is_inside_flow(start)
        reference = f"${{ref:{name.value}}}"
        if node.flow_style:
            self.edits.append(_Edit(start, end, f'"{reference}"' if inside_flow else reference))
            return
        # a block mapping starts on the line below its key, or behind a dash
        before = self.text[:start].rstrip()
        comments = [c.strip() for c in re.findall(r"(?m)[ \t]+#.*$", self.text[start:end])]
        comment = f"  {' '.join(comments)}" if comments else ""
        behind_key = before.endswith(":")
        at = len(before) if behind_key else start
        self.edits.append(_Edit(at, end, (" " if behind_key else "") + reference + comment))

    def _shorten_component(
        self, node: yaml.MappingNode, entry: dict[str, tuple[yaml.Node, yaml.Node]], annotation: Any
    ) -> None:
        variant_node = entry[VARIANT_KEY][1]
        kind_node = entry[COMPONENT_KEY][1] if COMPONENT_KEY in entry else None
        spec = self._spec(kind_node, variant_node, annotation)
        if spec is not None and spec.variant != variant_node.value:
            self.edits.append(_Edit(variant_node.start_mark.index, variant_node.end_mark.index, spec.variant))
        annotations = spec.annotations() if spec is not None else {}
        config = entry.get(CONFIG)
        fields = config[1].value if config is not None and isinstance(config[1], yaml.MappingNode) else []
        if config is None:
            fields = [(key, value) for key, value in node.value if key.value not in _KEYS]
        for key, value in fields:
            self._mend_field(key, value, spec, annotations)
        if node.flow_style or (config is not None and id(config[1]) in self.anchored):
            return
        if kind_node is not None and spec is not None and self._is_told_by_slot(spec, annotation):
            self._remove_pair(*entry[COMPONENT_KEY])
        if config is not None:
            self._lift_fields(*config)

    def _spec(self, kind: yaml.Node | None, variant: yaml.Node, annotation: Any) -> Spec | None:
        registry = self.schema.registry
        kinds = [str(kind.value)] if kind is not None else [s.kind for s in registry.fitting(slots_of(annotation)[0])]
        for name in dict.fromkeys(kinds):
            present = registry.renamed_variant(name, variant.value) or variant.value
            if (spec := registry.get(name, present)) is not None:
                return spec
        return None

    def _mend_field(self, key: yaml.Node, value: yaml.Node, spec: Spec | None, annotations: dict[str, Any]) -> None:
        name = key.value
        if spec is not None and name not in annotations:
            if name in spec.removed:
                self._remove_pair(key, value)
                return
            rename = spec.renamed.get(name)
            if rename is not None:
                self.edits.append(_Edit(key.start_mark.index, key.end_mark.index, rename.to))
                name = rename.to
                if rename.convert is not None:
                    self._mend_shape(value)
                    return
        self._visit(value, annotations.get(name))

    def _mend_shape(self, value: yaml.Node) -> None:
        """A norm that was a component names its kind, and no component key."""
        if isinstance(value, yaml.MappingNode):
            for key, child in value.value:
                if key.value == COMPONENT_KEY:
                    self._remove_pair(key, child)
                elif key.value == VARIANT_KEY:
                    self.edits.append(_Edit(key.start_mark.index, key.end_mark.index, "norm_type"))

    def _is_told_by_slot(self, spec: Spec, annotation: Any) -> bool:
        interfaces, _ = slots_of(annotation)
        fitting = self.schema.registry.fitting(interfaces) if interfaces else []
        return [other.kind for other in fitting if other.variant == spec.variant] == [spec.kind]

    def _remove_pair(self, key: yaml.Node, value: yaml.Node) -> None:
        """Take a key and its value out, with the line if nothing else stands on it."""
        start, end = key.start_mark.index, self._end_of_pair(key, value)
        line_start = self.text.rfind("\n", 0, start) + 1
        line_end = self.text.find("\n", end)
        line_end = len(self.text) if line_end < 0 else line_end
        head, rest = self.text[line_start:start], self.text[end:line_end]
        if head.strip() in ("", "-") and rest.strip() == "" and head.strip() == "":
            self.edits.append(_Edit(line_start, min(line_end + 1, len(self.text)), ""))
        elif head.strip() == "-" and rest.strip() == "":
            # the next key takes the place behind the dash
            following = re.compile(r"\s*").match(self.text, line_end)
            assert following is not None
            self.edits.append(_Edit(start, following.end(), ""))
        elif rest.strip().startswith("#"):
            self.edits.append(_Edit(start, end + (len(rest) - len(rest.lstrip())), ""))
        else:
            raise UserError(
                f"line {key.start_mark.line + 1}: `{key.value}` shares its line; write it on a line of its own"
            )

    def _lift_fields(self, key: yaml.Node, value: yaml.Node) -> None:
        """Fields move up to where `config:` stands."""
        if isinstance(value, yaml.ScalarNode) or not value.value:
            self._remove_pair(key, value)
            return
        assert isinstance(value, yaml.MappingNode)
        if value.flow_style:
            self._lift_flow(key, value)
            return
        line_start = self.text.rfind("\n", 0, key.start_mark.index) + 1
        line_end = self.text.find("\n", key.end_mark.index)
        tail = self.text[key.end_mark.index + 1 : line_end]
        kept = f"{self.text[line_start : key.start_mark.index]}{tail.strip()}\n" if tail.strip() else ""
        self.edits.append(_Edit(line_start, line_end + 1, kept))
        depth = value.start_mark.column - key.start_mark.column
        self._dedent(line_end + 1, self._end_of(value), depth)

    def _lift_flow(self, key: yaml.Node, value: yaml.MappingNode) -> None:
        margin = " " * key.start_mark.column
        for index, (field, child) in enumerate(value.value):
            start = key.start_mark.index if index == 0 else value.value[index - 1][1].end_mark.index
            between = "" if index == 0 else "\n" + margin
            self.edits.append(_Edit(start, field.start_mark.index, between))
            if isinstance(child, yaml.ScalarNode) and not child.style:
                continue
        last = value.value[-1][1].end_mark.index
        self.edits.append(_Edit(last, value.end_mark.index, ""))

    def _dedent(self, start: int, end: int, depth: int) -> None:
        position = start
        while position < end:
            line_end = self.text.find("\n", position)
            line_end = len(self.text) if line_end < 0 else line_end
            line = self.text[position:line_end]
            if line.strip():
                blanks = len(line) - len(line.lstrip(" "))
                self.edits.append(_Edit(position, position + min(depth, blanks), "", is_dedent=True))
            position = line_end + 1

    def _end_of(self, node: yaml.Node) -> int:
        """Where a node's last character stands; PyYAML lets a block end on the line of what follows."""
        if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
            last = node.value[-1]
            return self._end_of_pair(*last) if isinstance(last, tuple) else self._end_of(last)
        return int(node.end_mark.index)

    def _end_of_pair(self, key: yaml.Node, value: yaml.Node) -> int:
        if value.start_mark.index >= key.end_mark.index:
            return self._end_of(value)
        # an alias: the node stands where its anchor is
        alias = re.compile(r"\s*:\s*\*\S+").match(self.text, key.end_mark.index)
        return alias.end() if alias is not None else int(key.end_mark.index)

    def _is_inside_flow(self, start: int) -> bool:
        line = self.text[self.text.rfind("\n", 0, start) + 1 : start]
        return line.count("{") > line.count("}") or line.count("[") > line.count("]")


def _count(node: yaml.Node, counts: dict[int, int]) -> None:
    counts[id(node)] = counts.get(id(node), 0) + 1
    if counts[id(node)] > 1:
        return
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _count(key, counts)
            _count(value, counts)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _count(item, counts)
