"""What a config means for the training, whatever its entries are called and in whatever order they stand.

A checkpoint keeps it, so that a run that goes on with another config can be told what has changed. Free of torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from modalities.composition.compose import ComposedConfig
from modalities.inspection.differences import leaves

_ROOTS = ("settings", "train_dataset", "train_dataloader", "loss_fn", "app_state", "gradient_clipper")
"""Slots that shape what is learned; evaluation, logging and saving do not."""

_REFERENCE = re.compile(r"\$\{ref:(.+)\}")
_COMPONENT = re.compile(r"\w+/[\w.-]+")


@dataclass(frozen=True)
class Meaning:
    """Values by key.

    A key is a setting's path, or a component's kind and a field, such as ``optimizer.lr``; of models, which wrap each
    other, the kind and the variant, such as ``model/gpt2.n_layer``. A second component of a kind is ``dataset#2``.

    Args:
        values: As JSON has them.
        paths: Where each stands in the config, as the user wrote it.
        defaults: Keys that the user has not set.
    """

    values: Mapping[str, Any]
    paths: Mapping[str, str] = field(default_factory=dict)
    defaults: Collection[str] = ()


def meaning_of(composed: ComposedConfig) -> Meaning:
    """The meaning of a composed config, defaults included."""
    found = leaves(composed)
    meaning = _Reader({path: _plain(leaf.value) for path, leaf in found.items()}).read()
    defaults = {key for key, path in meaning.paths.items() if (found[path].place.origin or "").startswith("default")}
    return replace(meaning, defaults=defaults)


class _Reader:
    """Goes through a config from the slots on, each component once, in the order in which it is needed."""

    def __init__(self, leaf_values: Mapping[str, Any]) -> None:
        self._leaves = leaf_values
        self._components = {
            path: value
            for path, value in leaf_values.items()
            if isinstance(value, str) and _COMPONENT.fullmatch(value) and self._is_component(path)
        }
        self._keys: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        self._paths: dict[str, str] = {}
        self._seen: set[str] = set()

    def read(self) -> Meaning:
        for root in _ROOTS:
            self._visit(root)
        return Meaning(self._values, self._paths)

    def _is_component(self, path: str) -> bool:
        """A data path such as ``data/train`` looks like a variant, but nothing stands below it."""
        return "." not in path or any(other.startswith(f"{path}.") for other in self._leaves)

    def _visit(self, root: str) -> None:
        if root in self._seen:
            return
        self._seen.add(root)
        for path, value in self._below(root):
            reference = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if reference is not None:
                self._visit(reference.group(1))
                continue
            key = self._key(path)
            self._values[key], self._paths[key] = value, path

    def _below(self, root: str) -> Iterator[tuple[str, Any]]:
        return ((path, value) for path, value in self._leaves.items() if path == root or path.startswith(f"{root}."))

    def _key(self, path: str) -> str:
        owner = path
        while owner and owner not in self._components:
            owner = owner.rpartition(".")[0]
        if not owner:
            return path
        if owner not in self._keys:
            name = self._components[owner]
            kind = name if name.startswith("model/") else name.partition("/")[0]
            number = 1 + sum(key.partition("#")[0] == kind for key in self._keys.values())
            self._keys[owner] = kind if number == 1 else f"{kind}#{number}"
        return self._keys[owner] + path.removeprefix(owner)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
