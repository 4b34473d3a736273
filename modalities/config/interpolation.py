"""Answer the ``${…}`` of a tree, each answer remembering how it was found.

OmegaConf is the authority. Plain paths, questions to the surroundings, and texts made of them are answered here, so that a
copied value keeps its places; the rest is OmegaConf's.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modalities.config.environment import Environment
from modalities.config.faults import Fault
from modalities.config.suggestions import did_you_mean
from modalities.config.tree import BROKEN, CONFIG, Node, TreePath, is_component, node_from
from modalities.exceptions import ConfigError

if TYPE_CHECKING:
    from modalities.config.omegaconf_answers import OmegaConfAnswers

MAX_COPIES = 100_000
"""Beyond this, mappings that copy mappings are a mistake, or an attack."""

_PLAIN_PATH = re.compile(r"\$\{([A-Za-z_]\w*(?:\.[\w-]+|\[\d+\])*)\}")
_QUESTION = re.compile(rf"\$\{{({'|'.join(Environment.RESOLVERS)}|oc\.env):([\w./-]+)\}}")
_PART = re.compile(r"\$\{[^${}]*\}")
_RESOLVERS = (*Environment.RESOLVERS, "oc.env", "oc.decode", "oc.select")


def resolve(root: Node, environment: Environment, faults: list[Fault]) -> Node:
    """A copy of the tree without interpolations.

    Args:
        root: The tree as written.
        environment: Answers questions to the surroundings.
        faults: Receives each interpolation that has no answer; its value is then ``BROKEN``.
    """
    return _Resolver(root, environment, faults).resolve((), root, ())


class _Resolver:
    def __init__(self, root: Node, environment: Environment, faults: list[Fault]) -> None:
        self.root, self.environment, self.faults = root, environment, faults
        self.cycles: set[frozenset[str]] = set()
        self.omegaconf: OmegaConfAnswers | None = None
        self.num_copies = 0

    def resolve(self, path: TreePath, node: Node, asked: tuple[str, ...]) -> Node:
        if isinstance(node.value, dict):
            return replace(node, value={k: self.resolve((*path, k), c, asked) for k, c in node.value.items()})
        if isinstance(node.value, list):
            return replace(node, value=[self.resolve((*path, i), c, asked) for i, c in enumerate(node.value)])
        if not isinstance(node.value, str) or "${" not in node.value:
            return node
        if plain := _PLAIN_PATH.fullmatch(node.value):
            return self._copy_target(path, node, plain[1], asked)
        if question := _QUESTION.fullmatch(node.value):
            return self._ask_environment(path, node, question)
        return self._fill_in(path, node, asked) or self._ask_omegaconf(path, node)

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
        self.num_copies += 1
        if self.num_copies > MAX_COPIES:
            if self.num_copies > MAX_COPIES + 1:
                return replace(node, value=BROKEN)  # told
            return self._broken(path, node, f"`{node.value}`: interpolations that hold interpolations multiply")
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

    def _ask_environment(self, path: TreePath, node: Node, question: re.Match[str]) -> Node:
        resolver, argument = question[1], question[2]
        try:
            if resolver != "oc.env":
                value = self.environment.answer(resolver, argument)
            elif argument in os.environ:
                value = os.environ[argument]
            else:
                raise ValueError(f"the environment variable {argument} is not set")
        except (ValueError, ConfigError) as error:
            return self._broken(path, node, f"`{node.value}`: {error}")
        return self._answered(node, value)

    def _fill_in(self, path: TreePath, node: Node, asked: tuple[str, ...]) -> Node | None:
        """A text with plain paths and questions in it; None if there is anything else in it."""
        if "\\" in node.value or "${" in _PART.sub("", node.value):
            return None
        parts = _PART.findall(node.value)
        if not all(_PLAIN_PATH.fullmatch(part) or _QUESTION.fullmatch(part) for part in parts):
            return None
        text = node.value
        for part in parts:
            answer = self.resolve(path, replace(node, value=part), asked)
            if answer.value is BROKEN:
                return answer
            if not isinstance(answer.value, str | int) or isinstance(answer.value, bool):
                return None  # how OmegaConf spells it is OmegaConf's to say
            text = text.replace(part, str(answer.value), 1)
        return self._answered(node, text)

    def _ask_omegaconf(self, path: TreePath, node: Node) -> Node:
        from modalities.config.omegaconf_answers import BROKEN_TEXT, OmegaConfAnswers, Unanswered

        if self.omegaconf is None:
            self.omegaconf = OmegaConfAnswers(self.root, self.environment)
        try:
            value = self.omegaconf.ask(path, node.value)
        except Unanswered as error:
            unknown = error.unknown_resolver
            hint = did_you_mean(unknown, _RESOLVERS, "resolvers") if unknown else ""
            return self._broken(path, node, f"`{node.value}`: {error}", hint)
        if BROKEN_TEXT in str(value):
            return replace(node, value=BROKEN)  # told where it broke
        return self._answered(node, value)

    @staticmethod
    def _answered(node: Node, value: Any) -> Node:
        answer = node_from(value, node.place)
        return replace(answer, key_place=node.key_place, via=((node.value, node.place),))

    def _broken(self, path: TreePath, node: Node, message: str, hint: str = "") -> Node:
        fault = Fault("interpolation", message, path, node.place, len(node.value), [hint] if hint else [])
        self.faults.append(fault)
        return replace(node, value=BROKEN)
