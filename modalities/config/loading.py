"""From a YAML file to the one canonical tree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from modalities.config.environment import QUESTIONS, Environment
from modalities.config.faults import Fault
from modalities.config.interpolation import resolve
from modalities.config.tree import Node
from modalities.config.yaml_loader import load_yaml


@dataclass(frozen=True)
class LoadedConfig:
    """A config before anything of it is built.

    Args:
        written: The tree as written, interpolations unanswered.
        tree: The canonical tree.
        faults: What was wrong so far.
        text: The file's text.
    """

    written: Node
    tree: Node
    faults: list[Fault]
    text: str


def load_config(environment: Environment) -> LoadedConfig:
    """Read and resolve the environment's config file.

    Raises:
        ConfigError: The file cannot be read; every other fault is collected.
    """
    faults: list[Fault] = []
    path: Path = environment.config_file_path
    written = load_yaml(path, faults)
    environment.register_resolvers()
    tree = resolve(written, faults)
    return LoadedConfig(written, tree, faults, path.read_text(encoding="utf-8-sig"))


def dump_resolved(tree: Node) -> str:
    """The canonical tree as YAML that any safe loader reads and that runs again.

    What belongs to a rank, a machine or one run (``${cuda_env:RANK}``, …) stays a question.
    """
    return yaml.safe_dump(_with_questions(tree), sort_keys=False, allow_unicode=True, width=120)


def _with_questions(node: Node) -> object:
    if node.via:
        deepest = node.via[-1][0]
        if any("${" + question in deepest for question in QUESTIONS):
            return deepest
    if isinstance(node.value, dict):
        return {key: _with_questions(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [_with_questions(child) for child in node.value]
    return node.value if isinstance(node.value, str | int | float | bool | None) else str(node.value)
