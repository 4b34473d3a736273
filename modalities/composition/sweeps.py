"""Sweeps: the jobs of override words that give several values, and of files with a ``sweep:`` entry."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from modalities.composition.overrides import Word, parse_words
from modalities.config.faults import Fault, raise_on_errors
from modalities.config.tree import Node
from modalities.config.yaml_loader import load_yaml

SWEEP = "sweep"


def jobs_of(
    config: Path, texts: tuple[str, ...], options_of: Callable[[str], list[str]] = lambda _: []
) -> list[tuple[str, ...]]:
    """The override words of every job: the product of all that gives several values.

    Existing files list values under ``sweep:`` and interpolate from there; each list there is swept unless an override
    sets it.

    Args:
        config: The config file.
        texts: Override words.
        options_of: Options of a group, for ``glob(…)``.

    Raises:
        ConfigError: A word is no override, or the file cannot be read.
    """
    faults: list[Fault] = []
    words = parse_words(texts, faults, multirun=True)
    axes = [_values_of(word, options_of, faults) for word in words]
    raise_on_errors(faults)
    given = {word.key for word in words}
    axes += [axis for name, axis in _axes_of(load_yaml(config, faults)) if name not in given]
    jobs: list[tuple[str, ...]] = [()]
    for axis in axes:
        jobs = [(*job, option) for job in jobs for option in axis]
    return jobs


def _values_of(word: Word, options_of: Callable[[str], list[str]], faults: list[Fault]) -> list[str]:
    """The words, one for each value that a word gives."""
    from hydra.core.override_parser.types import Glob

    parsed = word.parsed
    if not parsed.is_sweep_override():
        return [word.text]
    key = parsed.get_key_element()
    if parsed.is_interval_sweep():
        message = f"`{word.text}`: an interval has no end of values"
        faults.append(Fault("sweep-interval", message, (), word.place, hints=["write range(0,1,0.25), or the values"]))
        return []
    if isinstance(value := parsed.value(), Glob):
        names = options_of(word.key)
        chosen = value.filter(names)
        if not chosen:
            message = f"`{word.text}`: none of the options of `{word.key}` is meant"
            hint = f"options: {', '.join(names)}" if names else "glob(…) chooses among the options of a group or a slot"
            faults.append(Fault("sweep-glob", message, (), word.place, hints=[hint]))
        return [f"{key}={name}" for name in chosen]
    return [f"{key}={option}" for option in parsed.sweep_string_iterator()]


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
