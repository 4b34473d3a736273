"""YAML text to located tree, with OmegaConf's reading of scalars (``1e-5`` is a number)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from modalities.config.faults import Fault
from modalities.config.tree import BROKEN, Node, Place, TreePath
from modalities.exceptions import ConfigError

_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(
    r"""^(?:[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)
        |\.[0-9_]+(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_OCTAL = re.compile(r"^[-+]?0[0-7_]+$")
_SEXAGESIMAL = re.compile(r"^[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?$")


_PLAIN_TAGS = {
    _TAG + name for name in ("map", "seq", "str", "int", "float", "bool", "null", "merge", "binary", "value")
}


MAX_NODES, MAX_DEPTH = 200_000, 100
"""Beyond this, a file is a mistake, or an attack that lets aliases multiply."""


class _Excessive(Exception):
    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's safe loader that reads floats as OmegaConf does and leaves dates as text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_TAG + "float", _TAG + "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+0123456789."))

IMPLICIT_RESOLVERS = _Loader.yaml_implicit_resolvers
"""How plain scalars are understood, for whoever writes YAML that is read here."""


def load_yaml(file: Path, faults: list[Fault]) -> Node:
    """Read a YAML file into a located tree.

    Args:
        file: The file.
        faults: Receives what is wrong in the text: syntax, duplicate keys, YAML 1.1 surprises (as warnings).

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"no such config file: {file}\n  help: {_files_beside(file)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read the config file {file}: {error.strerror}") from None
    return _Reader(str(file), text, faults).read()


def _files_beside(file: Path) -> str:
    from modalities.config.suggestions import did_you_mean

    folder = file.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist either; paths are relative to {Path.cwd()}"
    return did_you_mean(file.name, [f.name for f in folder.glob("*.y*ml")], f"YAML files in {folder}")


class _Reader:
    def __init__(self, name: str, text: str, faults: list[Fault]) -> None:
        self.name, self.text, self.faults = name, text, faults
        self.loader = _Loader(text)
        self.num_nodes = 0

    def read(self) -> Node:
        start = Place(self.name, 1, 1)
        try:
            root = self.loader.get_single_node()
            if root is None:
                self.faults.append(Fault("empty", "the config file is empty", (), start))
                return Node({}, start)
            if not isinstance(root, yaml.MappingNode):
                self.faults.append(Fault("yaml-syntax", "the config must be a mapping of names to values", (), start))
                return Node({}, start)
            return self._convert(root, (), ())
        except _Excessive as excessive:
            self.faults.append(excessive.fault)
        except RecursionError:
            self.faults.append(Fault("yaml-size", "the file is nested too deep", (), start))
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = Place(self.name, mark.line + 1, mark.column + 1) if mark else start
            message = " ".join(part for part in (error.problem, error.context) if part)
            hints = self._syntax_hints(message, place)
            self.faults.append(Fault("yaml-syntax", f"no valid YAML: {message}", (), place, hints=hints))
        except yaml.YAMLError as error:
            self.faults.append(Fault("yaml-syntax", f"no valid YAML: {error}", (), start))
        finally:
            self.loader.dispose()
        return Node({}, start)

    def _syntax_hints(self, message: str, place: Place) -> list[str]:
        """What usually is meant by the parser's words."""
        lines = self.text.splitlines()
        line = lines[place.line - 1] if 0 < place.line <= len(lines) else ""
        before = lines[place.line - 2] if place.line >= 2 else ""
        if "\t" in line[: place.column]:
            return ["the line begins with a tab: YAML indents by spaces"]
        if re.search(r"[\[{][^\]}\"']*\$\{", line):
            return ['inside {…} and […], interpolations are quoted: "${…}"']
        if "mapping values are not allowed" in message:
            return ['a text that holds ": " is quoted; or the line is indented too far']
        if "undefined alias" in message:
            return ["define it before with &name; a text that begins with * is quoted"]
        if "flow" in message and ("[" in before or "{" in before):
            return ["a bracket above is not closed"]
        if "expected key" in message or "block" in message:
            return ["the line is indented differently from its neighbours"]
        return []

    def _place(self, node: yaml.Node) -> Place:
        return Place(self.name, node.start_mark.line + 1, node.start_mark.column + 1)

    def _convert(self, node: yaml.Node, path: TreePath, parents: tuple[int, ...]) -> Node:
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES or len(parents) > MAX_DEPTH:
            what = f"has more than {MAX_NODES:,} values" if self.num_nodes > MAX_NODES else "is nested too deep"
            hint = "aliases that hold aliases multiply" if self.num_nodes > MAX_NODES else ""
            raise _Excessive(Fault("yaml-size", f"the file {what}", path[:8], self._place(node), hints=[hint]))
        if id(node) in parents:
            self.faults.append(Fault("yaml-alias", "an alias holds itself", path, self._place(node)))
            return Node(None, self._place(node))
        parents = (*parents, id(node))
        if node.tag not in _PLAIN_TAGS:
            shown = node.tag.replace(_TAG, "!!")
            message = f"the tag `{shown}` is not understood: a config holds plain values"
            self.faults.append(Fault("yaml-tag", message, path, self._place(node), len(shown), ["leave the tag out"]))
            return Node(BROKEN, self._place(node))
        if isinstance(node, yaml.MappingNode):
            return self._convert_mapping(node, path, parents)
        if isinstance(node, yaml.SequenceNode):
            items = [self._convert(item, (*path, i), parents) for i, item in enumerate(node.value)]
            return Node(items, self._place(node))
        assert isinstance(node, yaml.ScalarNode)
        return self._convert_scalar(node, path)

    def _convert_mapping(self, node: yaml.MappingNode, path: TreePath, parents: tuple[int, ...]) -> Node:
        children: dict[Any, Node] = {}
        merged: dict[Any, Node] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for source in sources:
                    converted = self._convert(source, path, parents)
                    if not isinstance(converted.value, dict):
                        message = "`<<` merges mappings, and this is none"
                        self.faults.append(Fault("yaml-merge", message, path, converted.place))
                        continue
                    for key, child in converted.value.items():
                        merged.setdefault(key, child)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                message = "a key must be a name, not a list or mapping"
                self.faults.append(Fault("yaml-key", message, path, self._place(key_node)))
                continue
            key = self.loader.construct_object(key_node, deep=True)
            place = self._place(key_node)
            if key in children:
                first = [("first given here", children[key].best_place)]
                message = f"`{key}` is given twice in one mapping"
                self.faults.append(Fault("duplicate-key", message, (*path, key), place, len(str(key)), related=first))
                continue
            children[key] = self._convert(value_node, (*path, key), parents)
            children[key].key_place = place
        return Node({**{k: v for k, v in merged.items() if k not in children}, **children}, self._place(node))

    def _convert_scalar(self, node: yaml.ScalarNode, path: TreePath) -> Node:
        place = self._place(node)
        raw = node.value if not node.style else None
        try:
            value = self.loader.construct_object(node, deep=True)
        except (yaml.MarkedYAMLError, ValueError) as error:
            problem = getattr(error, "problem", None) or str(error)
            self.faults.append(Fault("yaml-syntax", f"no valid YAML value: {problem}", path, place))
            return Node(None, place, raw=raw)
        if raw and node.tag == _TAG + "int" and (_OCTAL.match(raw) or _SEXAGESIMAL.match(raw)):
            base = "octal" if _OCTAL.match(raw) else "base 60"
            hint = f'write "{raw}" for the text, or the number in decimal'
            message = f"`{raw}` is read as the number {value} (YAML 1.1 {base})"
            self.faults.append(Fault("yaml11-int", message, path, place, len(raw), [hint], severity="warning"))
        return Node(value, place, raw=raw)
