"""Answer the ``${…}`` of a tree, each answer remembering how it was found.

OmegaConf is the authority. A plain ``${a.b.c}`` is looked up here instead, so that the copied value keeps its places.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from modalities.config.faults import Fault
from modalities.config.suggestions import did_you_mean
from modalities.config.tree import BROKEN, CONFIG, Node, TreePath, dotted, is_component, node_from

_PLAIN_PATH = re.compile(r"\$\{([A-Za-z_]\w*(?:\.[\w-]+|\[\d+\])*)\}")
_CONTEXT_FREE = re.compile(r"\$\{(cuda_env|modalities_env|node_env|warmstart_env|oc\.env):[\w.,/-]*\}")
_BROKEN_TEXT = "\0broken\0"
_RESOLVERS = ("cuda_env", "modalities_env", "node_env", "warmstart_env", "oc.env", "oc.decode", "oc.select")


def resolve(root: Node, faults: list[Fault]) -> Node:
    """A copy of the tree without interpolations.

    Args:
        root: The tree as written.
        faults: Receives each interpolation that has no answer; its value is then ``BROKEN``.
    """
    return _Resolver(root, faults).resolve((), root, ())


class _Resolver:
    def __init__(self, root: Node, faults: list[Fault]) -> None:
        self.root, self.faults = root, faults
        self.cycles: set[frozenset[str]] = set()
        self.unreadable: set[str] = set()
        self._whole: DictConfig | ListConfig | None = None

    def resolve(self, path: TreePath, node: Node, asked: tuple[str, ...]) -> Node:
        if isinstance(node.value, dict):
            return replace(node, value={k: self.resolve((*path, k), c, asked) for k, c in node.value.items()})
        if isinstance(node.value, list):
            return replace(node, value=[self.resolve((*path, i), c, asked) for i, c in enumerate(node.value)])
        if not isinstance(node.value, str) or "${" not in node.value:
            return node
        plain = _PLAIN_PATH.fullmatch(node.value)
        return self._copy_target(path, node, plain[1], asked) if plain else self._ask_omegaconf(path, node)

    def _copy_target(self, path: TreePath, node: Node, target_name: str, asked: tuple[str, ...]) -> Node:
        if target_name in asked:
            round_trip = asked[asked.index(target_name) :]
            if frozenset(round_trip) in self.cycles:
                return replace(node, value=BROKEN)  # told from its other end
            self.cycles.add(frozenset(round_trip))
            chain = " -> ".join([*round_trip, target_name])
            return self._broken(path, node, f"interpolation goes round: {chain}")
        target = self._look_up(target_name, (*asked, target_name))
        if target is not None and target.value is BROKEN:
            return replace(node, value=BROKEN)  # told where it broke
        if target is None:
            return self._points_nowhere(path, node, target_name, asked)
        found = self.resolve(path, target.copy(), (*asked, target_name))
        via = ((node.value, target.best_place if is_component(target) else target.place), *found.via)
        return replace(found, place=node.place, key_place=node.key_place, via=via)

    def _look_up(self, name: str, asked: tuple[str, ...]) -> Node | None:
        node: Node | None = self.root
        done: list[str] = []
        for part in re.sub(r"\[(\d+)\]", r".\1", name).split("."):
            assert node is not None
            if isinstance(node.value, str) and "${" in node.value:
                if ".".join(done) in asked:
                    return None
                node = self.resolve(tuple(done), node, (*asked, ".".join(done)))
            if node.value is BROKEN:
                return node
            if is_component(node) and part not in node.value:
                node = node.value.get(CONFIG, node)
            done.append(part)
            node = node.get((int(part) if isinstance(node.value, list) and part.isdigit() else part,))
            if node is None:
                return None
        return node

    def _points_nowhere(self, path: TreePath, node: Node, name: str, asked: tuple[str, ...]) -> Node:
        parts = name.split(".")
        parent, missing, depth = self.root, parts[0], 0
        for depth, missing in enumerate(parts):
            found = self._look_up(".".join(parts[: depth + 1]), asked)
            if found is None:
                break
            parent = found
        holder = parent.value.get(CONFIG, parent) if is_component(parent) else parent
        names = list(holder.value) if isinstance(holder.value, dict) else []
        inside = f" in `{'.'.join(parts[:depth])}`" if depth else ""
        hint = did_you_mean(missing, names, "names there")
        return self._broken(path, node, f"`{node.value}` points nowhere: no `{missing}`{inside}", hint)

    def _ask_omegaconf(self, path: TreePath, node: Node) -> Node:
        try:
            if not _is_readable(node.value):
                text = "it is not closed, or not written as OmegaConf reads it: ${name}, ${resolver:argument}"
                return self._broken(path, node, f"`{node.value}`: {text}")
            if _CONTEXT_FREE.fullmatch(node.value):
                value: Any = OmegaConf.create({"answer": node.value})["answer"]
            else:
                value = OmegaConf.select(self._whole_tree(), dotted(path), throw_on_resolution_failure=True)
            if isinstance(value, DictConfig | ListConfig):
                value = OmegaConf.to_container(value, resolve=True)
        except (OmegaConfBaseException, RecursionError, ValueError, KeyError, TypeError) as error:
            text = str(error).partition("\n")[0]
            text = re.sub(r"^\w+ raised while resolving interpolation: ", "", text).strip('"')
            unknown = re.search(r"Unsupported interpolation type (\S+)", text)
            hint = did_you_mean(unknown[1], _RESOLVERS, "resolvers") if unknown else ""
            return self._broken(path, node, f"`{node.value}`: {text}", hint)
        if _BROKEN_TEXT in str(value):
            return replace(node, value=BROKEN)  # told where it broke
        answer = node_from(value, node.place)
        return replace(answer, key_place=node.key_place, via=((node.value, node.place),))

    def _whole_tree(self) -> DictConfig | ListConfig:
        """The tree for OmegaConf; texts that it cannot read are left out, and told where they stand."""
        if self._whole is None:
            for _, leaf in self.root.leaves():
                if isinstance(leaf.value, str) and "${" in leaf.value and not _is_readable(leaf.value):
                    self.unreadable.add(leaf.value)
            self._whole = OmegaConf.create(_without_broken(self.root.plain(), self.unreadable))
        return self._whole

    def _broken(self, path: TreePath, node: Node, message: str, hint: str = "") -> Node:
        fault = Fault("interpolation", message, path, node.place, len(node.value), [hint] if hint else [])
        self.faults.append(fault)
        return replace(node, value=BROKEN)


def _is_readable(text: str) -> bool:
    try:
        OmegaConf.create({"text": text})
    except OmegaConfBaseException:
        return False
    return True


def _without_broken(value: Any, unreadable: set[str]) -> Any:
    """Plain values in which what is broken is a text that OmegaConf takes, and that is found again in its answers."""
    if isinstance(value, dict):
        return {key: _without_broken(child, unreadable) for key, child in value.items()}
    if isinstance(value, list):
        return [_without_broken(child, unreadable) for child in value]
    return _BROKEN_TEXT if value is BROKEN or (isinstance(value, str) and value in unreadable) else value
