"""Interpolations that only OmegaConf answers: resolvers with several arguments, nested and relative ones.

Importing OmegaConf costs half of what checking a config does, so it is asked for what plain look-ups cannot answer.
"""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from modalities.config.environment import Environment
from modalities.config.tree import BROKEN, Node, TreePath, dotted

BROKEN_TEXT = "\0broken\0"
"""Stands in an answer for what is broken elsewhere."""


class Unanswered(Exception):
    """OmegaConf has no answer; the message says why.

    Args:
        message: What is wrong.
        unknown_resolver: The resolver's name, if there is none of that name.
    """

    def __init__(self, message: str, unknown_resolver: str | None = None) -> None:
        super().__init__(message)
        self.unknown_resolver = unknown_resolver


class OmegaConfAnswers:
    """Answers from one tree.

    Args:
        root: The tree as written.
        environment: Answers the resolvers of ours.
    """

    def __init__(self, root: Node, environment: Environment) -> None:
        self.root = root
        self._whole: DictConfig | ListConfig | None = None
        for name in environment.RESOLVERS:

            def ask(argument: str, resolver: str = name) -> Any:
                return environment.answer(resolver, argument)

            OmegaConf.register_new_resolver(name, ask, replace=True)

    def ask(self, path: TreePath, text: str) -> Any:
        """The value of an interpolated text at a path.

        Raises:
            Unanswered: There is none.
        """
        if not _is_readable(text):
            raise Unanswered("it is not closed, or not written as OmegaConf reads it: ${name}, ${resolver:argument}")
        try:
            value = OmegaConf.select(self._whole_tree(), dotted(path), throw_on_resolution_failure=True)
            if isinstance(value, DictConfig | ListConfig):
                value = OmegaConf.to_container(value, resolve=True)
        except (OmegaConfBaseException, RecursionError, ValueError, KeyError, TypeError) as error:
            first = str(error).partition("\n")[0]
            unknown = re.search(r"Unsupported interpolation type (\S+)", first)
            first = re.sub(r"^\w+ raised while resolving interpolation: ", "", first).strip('"')
            raise Unanswered(first, unknown[1] if unknown else None) from error
        return value

    def _whole_tree(self) -> DictConfig | ListConfig:
        """The tree for OmegaConf; texts that it cannot read are left out, and told where they stand."""
        if self._whole is None:
            texts = {leaf.value for _, leaf in self.root.leaves() if isinstance(leaf.value, str) and "${" in leaf.value}
            unreadable = {text for text in texts if not _is_readable(text)}
            self._whole = OmegaConf.create(_without_broken(self.root.plain(), unreadable))
        return self._whole


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
    return BROKEN_TEXT if value is BROKEN or (isinstance(value, str) and value in unreadable) else value
