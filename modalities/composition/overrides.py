"""Hydra's override words (``optimizer.lr=3e-4``, ``~mfu_calculator``, ``+x=1``), applied to the canonical tree."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modalities.composition.imports import IMPORTS
from modalities.composition.schema import Schema
from modalities.composition.short_forms import ShortForms, component_node
from modalities.config.faults import Fault
from modalities.config.suggestions import did_you_mean, nearest
from modalities.config.tree import (
    BROKEN,
    COMPONENT_KEY,
    CONFIG,
    VARIANT_KEY,
    Key,
    Node,
    Place,
    TreePath,
    dotted,
    is_component,
    node_from,
    reference_name,
)
from modalities.registry.spec import Spec

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


@dataclass(frozen=True)
class Word:
    """One override, as written and as parsed."""

    text: str
    parsed: Override

    @property
    def place(self) -> Place:
        return Place(origin=f"override `{self.text}`")

    @property
    def key(self) -> str:
        return str(self.parsed.key_or_group).replace("/", ".")

    @property
    def is_deletion(self) -> bool:
        return self.parsed.is_delete()

    def value(self) -> Any:
        """The value in plain Python; quoted text is text."""
        return _plain(self.parsed.value())


def parse_words(texts: tuple[str, ...], faults: list[Fault], *, multirun: bool = False) -> list[Word]:
    """Parse override words.

    Args:
        texts: As on the command line.
        faults: Receives words that are none, and several values where one run is asked for.
        multirun: Whether a word may give several values.
    """
    if not texts:
        return []
    # Hydra costs a tenth of a second: only who overrides pays
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    words = []
    for text in texts:
        place = Place(origin=f"override `{text}`")
        try:
            parsed = parser.parse_override(text)
        except HydraException as error:
            message = f"`{text}` is no override: {_parser_complaint(str(error))}"
            hint = "write path=value, +path=value to add, ~path to remove; quote values with spaces or commas"
            if "=" not in text and not text.startswith("~"):
                hint = f"write {text}=VALUE; options such as --config stand in front of overrides or behind them"
            faults.append(Fault("override-syntax", message, (), place, hints=[hint]))
            continue
        if str(parsed.key_or_group).partition(".")[0] == "hydra":
            message = f"`{text}` sets Hydra itself, which does not run here"
            hint = "leave it out; run folders are named by --experiment_id and --experiments_root_path"
            faults.append(Fault("override-hydra", message, (), place, hints=[hint]))
            continue
        if str(parsed.key_or_group).partition(".")[0] == IMPORTS:
            message = f"`{text}` comes too late: modules are imported before overrides are read"
            faults.append(Fault("import", message, (), place, hints=["give --import MODULE, or --import FILE.py"]))
            continue
        if parsed.is_sweep_override() and not multirun:
            quoted = text.replace("=", "='", 1) + "'"
            message = f"`{text}` gives several values, and one run takes one"
            hints = ["add --multirun to run each of them", f"or quote the text: {quoted}, or [..] for a list"]
            faults.append(Fault("sweep-without-multirun", message, (), place, hints=hints))
            continue
        words.append(Word(text, parsed))
    return words


def apply_overrides(root: Node, words: list[Word], schema: Schema, faults: list[Fault]) -> None:
    """Change the canonical tree as the words say, in this tree.

    The order of the words does not matter: first comes what is removed, then variants, outer ones before inner ones, then
    the rest.

    Args:
        root: The canonical tree, interpolations unanswered.
        words: What to change.
        schema: Says what may stand where.
        faults: Receives words that fit nothing, and as notes the fields that another variant does not have.
    """
    _Overrider(root, schema, faults).apply(words)


class _Overrider:
    def __init__(self, root: Node, schema: Schema, faults: list[Fault]) -> None:
        self.root, self.schema, self.faults = root, schema, faults
        self.short_forms = ShortForms(schema, faults, root.value)

    def apply(self, words: list[Word]) -> None:
        removals = [word for word in words if word.is_deletion]
        choices = [word for word in words if self._chooses_variant(word)]
        choices.sort(key=lambda word: word.key.count("."))
        for word in [*removals, *choices, *(w for w in words if w not in removals and w not in choices)]:
            if word.is_deletion:
                self._delete(word)
            else:
                self._assign(word)

    def _chooses_variant(self, word: Word) -> bool:
        if word.is_deletion:
            return False
        value = word.value()
        if isinstance(value, dict):
            return VARIANT_KEY in value
        return isinstance(value, str) and any(spec.variant == value for spec in self.schema.registry)

    def _delete(self, word: Word) -> None:
        path = self.schema.locate(self.root, word.key)
        node, parent = self.root.get(path), self.root.get(path[:-1])
        if node is None or parent is None:
            names = self.schema.names_below(self.root, path[:-1])
            present = [name for name in names if self.root.get((*path[:-1], name)) is not None]
            hint = did_you_mean(path[-1], present, "names there")
            self._fault("override-no-target", f"`{word.text}`: there is no `{word.key}` to remove", path, word, hint)
            return
        if word.parsed.value() is not None and str(node.plain()) != str(word.value()):
            message = f"`{word.text}`: `{word.key}` is `{node.plain()}`, so it is not removed"
            self._fault("override-no-target", message, path, word, f"write ~{word.key} to remove whatever it is")
            return
        del parent.value[path[-1]]

    def _assign(self, word: Word) -> None:
        path = self.schema.locate(self.root, word.key)
        node = self.root.get(path)
        forces = word.parsed.is_force_add()
        adds = word.parsed.is_add() and not forces
        if adds and node is not None:
            set_here = [("set here", node.best_place)]
            message = f"`{word.text}`: `{word.key}` is there already"
            hint = "leave out the `+` to change it"
            self.faults.append(Fault("override-exists", message, path, word.place, hints=[hint], related=set_here))
            return
        if node is None and not adds and not forces and not self._is_declared(path):
            self._no_target(word, path)
            return
        holder = self._holder(word, path)
        if holder is not None:
            self._set(holder, path, word.value(), word)

    def _is_declared(self, path: TreePath) -> bool:
        parent = self.root.get(path[:-1])
        if parent is not None and isinstance(parent.value, str):
            return True  # a name that was not understood stands there: that is told already
        owner = path[:-2] if path[-2:-1] == (CONFIG,) else path[:-1]
        return str(path[-1]) in self.schema.names_below(self.root, owner)

    def _no_target(self, word: Word, path: TreePath) -> None:
        depth = 1
        while depth < len(path) and self.root.get(path[:depth]) is not None:
            depth += 1
        owner = path[: depth - 2] if path[depth - 2 : depth - 1] == (CONFIG,) else path[: depth - 1]
        names = self.schema.names_below(self.root, owner)
        if not owner:
            names += self.schema.names_below(self.root, ("settings",))
        holder = self.root.get(path[: depth - 1])
        if holder is not None and not isinstance(holder.value, dict):
            self._nothing_inside(word, path, depth - 1, holder)
            return
        shown = [str(key) for key in path[: depth - 1] if key != CONFIG]
        inside = f" in `{'.'.join(shown)}`" if shown else ""
        hints = []
        if near := nearest(path[depth - 1], names, limit=1):
            corrected = ".".join([*shown, near[0], *(str(key) for key in path[depth:] if key != CONFIG)])
            hints.append(f"did you mean `{corrected}`?")
        else:
            elsewhere = [dotted(p) for p, _ in self.root.leaves() if p[-1] == path[-1]]
            hints.append(
                "did you mean " + " or ".join(f"`{p.replace('.config.', '.')}`" for p in elsewhere[:3]) + "?"
                if elsewhere
                else did_you_mean(path[depth - 1], names, "names there")
            )
        if not owner and len(path) == 1:
            hints.append(f"`+{word.text}` adds an entry of that name")
        message = f"`{word.text}`: there is no `{path[depth - 1]}`{inside}"
        self.faults.append(Fault("override-no-target", message, path, word.place, hints=hints))

    def _nothing_inside(self, word: Word, path: TreePath, depth: int, holder: Node) -> None:
        shown = ".".join(str(key) for key in path[:depth] if key != CONFIG)
        what = f"is `{holder.value}`, which has nothing inside"
        hints = []
        if isinstance(holder.value, list):
            what = f"is a list of {len(holder.value)} items, numbered from 0"
            hints = [f"+{word.key.rpartition('.')[0]}.{len(holder.value)}=… appends one"]
        message = f"`{word.text}`: `{shown}` {what}"
        related = [("set here", holder.best_place)]
        self.faults.append(Fault("override-no-target", message, path, word.place, hints=hints, related=related))

    def _holder(self, word: Word, path: TreePath) -> Node | None:
        """The mapping or list that the value goes into, made if need be."""
        node = self.root
        for depth, key in enumerate(path[:-1]):
            child = node.get((key,))
            if child is None and isinstance(node.value, dict):
                child = node.value[key] = Node({}, word.place, word.place)
            if child is None or child.value is BROKEN:
                return None  # told already
            if child.value is None:
                child.value = {}
            if not isinstance(child.value, dict | list):
                self._nothing_inside(word, path, depth + 1, child)
                return None
            node = child
        if isinstance(node.value, list) and not (
            isinstance(path[-1], int) and -len(node.value) <= path[-1] <= len(node.value)
        ):
            self._nothing_inside(word, path, len(path) - 1, node)
            return None
        return node

    def _set(self, holder: Node, path: TreePath, value: Any, word: Word) -> None:
        key: Key = path[-1]
        node = holder.get((key,))
        interfaces = self.schema.slot_at(self.root, path)
        component = node if node is not None and is_component(node) else None
        if isinstance(value, str) and "${" not in value and (interfaces or component is not None):
            self._choose_variant(holder, path, Node(value, word.place), component, word)
            return
        if isinstance(value, dict) and node is not None and isinstance(node.value, dict) and value:
            self._merge(holder, path, dict(value), component, word)
            return
        if self._would_bury(node, value, interfaces):
            assert node is not None
            names = ", ".join(map(str, list(node.value)[:6]))
            message = f"`{word.text}` would put a text in place of the section `{word.key}` ({names})"
            hint = f"set one of its fields: {word.key}.{next(iter(node.value))}=…"
            related = [("the section", node.best_place)]
            self.faults.append(Fault("override-buries", message, path, word.place, hints=[hint], related=related))
            return
        annotation = self.schema.annotation_at(self.root, path)
        new = self.short_forms.expand(node_from(value, word.place), annotation, path)
        if isinstance(holder.value, list):
            assert isinstance(key, int)
            holder.value[key : key + 1 or None] = [new]
        else:
            holder.value[key] = new

    @staticmethod
    def _would_bury(node: Node | None, value: Any, interfaces: Any) -> bool:
        has_content = node is not None and isinstance(node.value, dict) and bool(node.value)
        scalar = isinstance(value, str | int | float | bool) and not (isinstance(value, str) and "${" in value)
        is_section = node is not None and not is_component(node) and reference_name(node) is None
        return has_content and scalar and not interfaces and is_section

    def _merge(self, holder: Node, path: TreePath, value: dict[Any, Any], component: Node | None, word: Word) -> None:
        """Mappings are merged, as in Hydra."""
        variant = value.pop(VARIANT_KEY, None)
        if component is not None and isinstance(variant, str):
            self._choose_variant(holder, path, Node(variant, word.place), component, word)
        elif variant is not None:
            value[VARIANT_KEY] = variant
        if isinstance(value.get(CONFIG), dict) and component is not None:
            value |= value.pop(CONFIG)
        value.pop(COMPONENT_KEY, None)
        for key, child in value.items():
            inner = self.schema.locate(self.root, dotted((*path, key)))
            inner_holder = self.root.get(inner[:-1])
            if inner_holder is not None:
                self._set(inner_holder, inner, child, word)

    def _choose_variant(self, holder: Node, path: TreePath, variant: Node, old: Node | None, word: Word) -> None:
        interfaces = self.schema.slot_at(self.root, path)
        spec: Spec | None
        if interfaces:
            spec = self.short_forms.choose(variant, interfaces, path)
        else:
            assert old is not None
            kind = old.value.get(COMPONENT_KEY)
            kind_name = str(kind.value) if kind is not None else ""
            spec = self.schema.registry.get(kind_name, str(variant.value))
            if spec is None:
                hint = did_you_mean(variant.value, self.schema.registry.variants(kind_name), f"variants of {kind_name}")
                message = f"`{kind_name}` has no variant `{variant.value}`"
                self.faults.append(Fault("unknown-variant", message, path, word.place, hints=[hint]))
        if spec is None:
            return
        fields = self._kept_fields(old, spec, path, word) if old is not None else {}
        key_place = old.key_place if old is not None else word.place
        new = component_node(spec, word.place, key_place, fields)
        if isinstance(holder.value, list):
            assert isinstance(path[-1], int)
            holder.value[path[-1]] = new
        else:
            holder.value[path[-1]] = new

    def _kept_fields(self, old: Node, spec: Spec, path: TreePath, word: Word) -> dict[Any, Node]:
        """What another variant takes over of a component's fields; what it does not have is told."""
        config = old.value.get(CONFIG)
        given = dict(config.value) if config is not None and isinstance(config.value, dict) else {}
        known = spec.annotations()
        kept = {key: child for key, child in given.items() if key in known}
        dropped = {key: child for key, child in given.items() if key not in known}
        for field, sources in spec.takes_over.items():
            taken = next((found for source in sources if (found := self._taken(given, source)) is not None), None)
            if taken is not None and field not in kept:
                kept[field] = taken
        old_variant = old.value.get(VARIANT_KEY)
        if dropped and old_variant is not None and old_variant.value != spec.variant:
            keeps = f"keeps {', '.join(map(str, kept))}" if kept else "keeps nothing"
            message = f"`{word.text}`: {spec.name} has no {', '.join(map(str, dropped))}; {keeps}"
            related = [("was set here", child.best_place) for child in dropped.values()]
            self.faults.append(Fault("fields-dropped", message, path, word.place, related=related, severity="note"))
        return kept

    def _taken(self, given: dict[Any, Node], source: str) -> Node | None:
        """``checkpoint_saving_execution.checkpoint_path`` or ``checkpoint_saving_strategy/VARIANT.k`` of the old fields."""
        name, _, field = source.partition(".")
        slot, _, variant = name.partition("/")
        inner = given.get(slot)
        if inner is not None and (reference := reference_name(inner)) is not None:
            inner = self.root.get((reference.value,))
        if inner is None or not is_component(inner):
            return None
        if variant and inner.value[VARIANT_KEY].value != variant:
            return None
        return inner.get((CONFIG, field))

    def _fault(self, code: str, message: str, path: TreePath, word: Word, hint: str) -> None:
        self.faults.append(Fault(code, message, path, word.place, hints=[hint]))


def _plain(value: Any) -> Any:
    if not isinstance(value, dict | list) and hasattr(value, "text") and hasattr(value, "quote"):
        return value.text  # quoted text
    if isinstance(value, dict):
        return {_plain(key): _plain(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_plain(child) for child in value]
    return value


def _parser_complaint(text: str) -> str:
    first = re.sub(r"\s*See https?:\S+.*", "", text.strip(), flags=re.DOTALL).split("\n")[0]
    if "missing EQUAL" in first:
        return "it has no `=`"
    if unread := re.search(r"token recognition error at: '(.)", first):
        if unread[1] in "'\"":
            return "a quote is not closed, or stands in the middle of a word"
        return "a path takes letters, digits, `_` and single dots; other characters stand in a quoted value"
    return first[:1].lower() + first[1:]
