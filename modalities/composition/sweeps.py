"""Sweeps: the jobs of override words that give several values, and of files with a ``sweep:`` entry."""

from __future__ import annotations

import json
from pathlib import Path

from modalities.composition.overrides import parse_words
from modalities.config.faults import Fault, raise_on_errors
from modalities.config.tree import Node
from modalities.config.yaml_loader import load_yaml

SWEEP = "sweep"


def jobs_of(config: Path, texts: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The override words of every job: the product of all that gives several values.

    Existing files list values under ``sweep:`` and interpolate from there; each list there is swept unless an override
    sets it.

    Raises:
        ConfigError: A word is no override, or the file cannot be read.
    """
    faults: list[Fault] = []
    words = parse_words(texts, faults, multirun=True)
    raise_on_errors(faults)
    axes: list[list[str]] = []
    for word in words:
        options = [word.text]
        if word.parsed.is_sweep_override():
            key = word.parsed.get_key_element()
            options = [f"{key}={value}" for value in word.parsed.sweep_string_iterator()]
        axes.append(options)
    given = {word.key for word in words}
    axes += [axis for name, axis in _axes_of(load_yaml(config, faults)) if name not in given]
    jobs: list[tuple[str, ...]] = [()]
    for axis in axes:
        jobs = [(*job, option) for job in jobs for option in axis]
    return jobs


def swept_lists(root: Node) -> dict[str, Node]:
    """The lists under ``sweep:`` by dotted path."""
    sweep = root.value.get(SWEEP)
    if sweep is None or not isinstance(sweep.value, dict):
        return {}
    return {f"{SWEEP}.{name}": child for name, child in sweep.value.items() if isinstance(child.value, list)}


def _axes_of(root: Node) -> list[tuple[str, list[str]]]:
    return [
        (name, [f"{name}={json.dumps(item.plain())}" for item in values.value])
        for name, values in swept_lists(root).items()
    ]
