"""From a YAML file, groups and overrides to the one canonical tree."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel

from modalities.composition.default_places import fill
from modalities.composition.imports import import_modules, import_named_in
from modalities.composition.overrides import Word, apply_overrides, parse_words
from modalities.composition.schema import Schema, is_own_entry
from modalities.composition.short_forms import expand
from modalities.composition.sweeps import swept_lists
from modalities.config.environment import Environment
from modalities.config.faults import Fault, raise_on_errors
from modalities.config.interpolation import resolve
from modalities.config.tree import BROKEN, CONFIG, Node, dotted
from modalities.config.yaml_loader import load_yaml
from modalities.registry.registry import Registry

DEFAULTS = "defaults"
OPEN = "???"
"""Hydra's word for a value that whoever builds on a config must give."""
_PATH = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*")

RecipeChoice = type[BaseModel] | Callable[[Node], type[BaseModel]]
"""The recipe, or what tells it from the file's own top level."""


@dataclass(frozen=True)
class ConfigRequest:
    """Which config, and how it is changed.

    Args:
        environment: The file, and what its interpolations may ask.
        overrides: Hydra's override words.
        config_folders: Further folders with groups for defaults lists.
        imports: Modules and ``.py`` files that register components.
    """

    environment: Environment
    overrides: tuple[str, ...] = ()
    config_folders: tuple[Path, ...] = ()
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class ComposedConfig:
    """A config before anything of it is checked or built.

    Args:
        unresolved: The canonical tree with its interpolations.
        tree: The canonical tree, interpolations answered.
        faults: What was wrong so far.
        text: The file's text.
        schema: The registry, the user's components included, and the recipe.
        files: The files that the config is made of, the main one first.
        imports: Modules that the config itself imports.
    """

    unresolved: Node
    tree: Node
    faults: list[Fault]
    text: str
    schema: Schema
    files: list[Path] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)

    def reads(self) -> frozenset[str]:
        """Dotted paths that interpolations ask for."""
        texts = (
            leaf.value for _, leaf in self.unresolved.leaves() if isinstance(leaf.value, str) and "${" in leaf.value
        )
        return frozenset(path for text in texts for path in self.paths_in(text))

    @staticmethod
    def paths_in(text: str) -> list[str]:
        """Dotted paths named in a text with interpolations."""
        return _PATH.findall(text)


def compose_config(request: ConfigRequest, recipe: RecipeChoice, registry: Registry | None = None) -> ComposedConfig:
    """Read, compose, expand, override and resolve a config.

    Args:
        request: Which config, and how it is changed.
        recipe: What the command reads at the top level.
        registry: Where components are looked up; by default the standard one with the user's imports.

    Raises:
        ConfigError: The file cannot be read or composed; every other fault is collected.
        UserError: A module of ``--import`` cannot be imported.
    """
    import_modules(request.imports)
    faults: list[Fault] = []
    file = request.environment.config_file_path
    root = load_yaml(file, faults)
    _stop_if_unreadable(root, faults)
    text = file.read_text(encoding="utf-8-sig")
    imported = import_named_in(root, faults)
    chosen = recipe if isinstance(recipe, type) else recipe(root)
    schema = Schema(registry or Registry.standard(), chosen)
    words = parse_words(request.overrides, faults)
    files = [file]
    if DEFAULTS in root.value:
        root, words, files = _compose_defaults(request, root, words, schema, faults)
        _stop_if_unreadable(root, faults)
        chosen = recipe if isinstance(recipe, type) else recipe(root)
        if more := import_named_in(root, faults):
            imported += more
            schema = Schema(registry or Registry.standard(), chosen)
        schema = replace(schema, recipe=chosen)
    canonical = expand(root, schema, faults)
    apply_overrides(canonical, words, schema, faults)
    _refuse_unswept(canonical, faults)
    _refuse_open(canonical, faults)
    fill(canonical, schema)
    tree = resolve(canonical, request.environment, faults)
    expanded = expand(tree, schema, faults)
    if _num_nodes(expanded) != _num_nodes(tree):
        # a variant's name came out of an interpolation: its defaults are still to be asked for
        fill(expanded, schema)
        expanded = resolve(expanded, request.environment, faults)
    return ComposedConfig(canonical, expanded, faults, text, schema, files, imported)


def _compose_defaults(
    request: ConfigRequest, root: Node, words: list[Word], schema: Schema, faults: list[Fault]
) -> tuple[Node, list[Word], list[Path]]:
    # Hydra's composer costs a tenth of a second: only files with a defaults list pay
    from modalities.composition.defaults_list import compose_defaults

    file = request.environment.config_file_path
    return compose_defaults(file, root, words, list(request.config_folders), schema, faults)


def _stop_if_unreadable(root: Node, faults: list[Fault]) -> None:
    """Where there is no tree, there is nothing else to tell."""
    if not root.value:
        raise_on_errors(faults)


def _refuse_unswept(root: Node, faults: list[Fault]) -> None:
    for path, values in swept_lists(root).items():
        message = f"`{path}` lists values to try, and one run takes one"
        hints = ["add --multirun to run each of them"]
        if values.value:
            hints.append(f"or choose one: {path}={values.value[0].plain()}")
        faults.append(Fault("sweep-without-multirun", message, tuple(path.split(".")), values.best_place, hints=hints))
        values.value = BROKEN


def _refuse_open(root: Node, faults: list[Fault]) -> None:
    for path, leaf in root.leaves():
        if leaf.value == OPEN and not is_own_entry(path[0]):
            shown = dotted(tuple(key for key in path if key != CONFIG))
            message = f"`{shown}` is left open here (`{OPEN}`) and must be given"
            hint = f"set it in your config, or on the command line: {shown}=…"
            faults.append(Fault("open-value", message, path, leaf.place, len(OPEN), [hint]))
            leaf.value = BROKEN


def _num_nodes(node: Node) -> int:
    if isinstance(node.value, dict):
        return 1 + sum(map(_num_nodes, node.value.values()))
    if isinstance(node.value, list):
        return 1 + sum(map(_num_nodes, node.value))
    return 1
