"""``defaults:`` lists and groups, composed by Hydra itself, with every value keeping its file and line.

Hydra sees a skeleton: mappings as they are, and for each scalar or list a number. The numbers stand for nodes of the
located tree; they come back in Hydra's order of precedence. Groups are looked for beside the config file, in the folders
given by ``--config-dir``, in those that modalities ships, and among the registry's components: each is an option of the
slot that it fits.
"""

from __future__ import annotations

import warnings
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import modalities
from modalities.composition.overrides import Word
from modalities.composition.schema import Schema
from modalities.config.faults import Fault
from modalities.config.suggestions import did_you_mean
from modalities.config.tree import COMPONENT_KEY, CONFIG, VARIANT_KEY, Node, Place, is_component
from modalities.config.yaml_loader import load_yaml
from modalities.registry.fields import child_annotation, slots_of
from modalities.registry.spec import Spec

DEFAULTS = "defaults"
_AT = "__at__"
_SUFFIXES = (".yaml", ".yml")
_MAX_NAME = 200
"""No folder has a longer name."""


def shipped_groups() -> Path:
    """The folder of groups that comes with modalities: inside the installed package, or beside it in a checkout."""
    package = Path(modalities.__file__).parent
    inside = package / "config_files"
    folder = inside if inside.is_dir() else package.parent / "config_files"
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


@dataclass
class Composition:
    """What one composition reads and finds.

    Args:
        folders: Where groups are looked for, in this order.
        schema: Whose components are options of their slots.
        faults: What is wrong in the files.
        nodes: What the numbers of the skeleton stand for.
        lists: The defaults lists, to point at.
        files: The files read.
    """

    folders: list[Path]
    schema: Schema
    faults: list[Fault] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    lists: list[Node] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def number(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def skeleton(self, node: Node) -> Any:
        if not isinstance(node.value, dict):
            return self.number(node)
        inside = {str(key): self.skeleton(child) for key, child in _flat(node).items()}
        return {**inside, _AT: self.number(replace(node, value=None))}

    def filled(self, skeleton: Any) -> Node:
        if not isinstance(skeleton, dict):
            node: Node = self.nodes[skeleton]
            return node
        at = self.nodes[skeleton[_AT]] if _AT in skeleton else Node(None, Place(origin="a group of the defaults list"))
        return replace(at, value=_joined({key: self.filled(child) for key, child in skeleton.items() if key != _AT}))


def _flat(node: Node) -> dict[Any, Node]:
    """A component's entry without `config:`, so that files in different forms merge field by field."""
    config = node.value.get(CONFIG)
    if not is_component(node) or config is None or not isinstance(config.value, dict):
        return dict(node.value)
    others = {key: child for key, child in node.value.items() if key != CONFIG}
    if set(others) - {COMPONENT_KEY, VARIANT_KEY}:
        return dict(node.value)  # a form of its own, which is told
    return {**others, **config.value}


def _joined(entry: dict[Any, Node]) -> dict[Any, Node]:
    """`config:` of a later file, which does not name the component again, joined with the fields of an earlier one."""
    config, variant = entry.get(CONFIG), entry.get(VARIANT_KEY)
    if (
        config is None
        or variant is None
        or not isinstance(config.value, dict)
        or config.place.file == variant.place.file
    ):
        return entry
    return {**{key: child for key, child in entry.items() if key != CONFIG}, **config.value}


_current: ContextVar[Composition] = ContextVar("current")


def compose_defaults(
    file: Path, root: Node, words: list[Word], folders: list[Path], schema: Schema, faults: list[Fault]
) -> tuple[Node, list[Word], list[Path]]:
    """Compose a config file that has a defaults list.

    Args:
        file: The file.
        root: Its tree, as loaded.
        words: Overrides; those that choose an option of a group in the defaults list are used here.
        folders: Further folders with groups.
        schema: Whose components are options of their slots.
        faults: Receives what is wrong.

    Returns:
        The composed tree, the overrides that are left, and the files that it is made of.
    """
    composition = Composition([file.parent, *folders, shipped_groups()], schema)
    _register_sources()
    token = _current.set(composition)
    # Hydra is one per process, and we may be inside somebody's Hydra application
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        return _compose(file, root, words, composition)
    finally:
        GlobalHydra.instance().hydra = outer
        _current.reset(token)
        # the main file has been read before
        known = {(fault.code, fault.message, fault.place) for fault in faults}
        faults += [fault for fault in composition.faults if (fault.code, fault.message, fault.place) not in known]


def _compose(
    file: Path, root: Node, words: list[Word], composition: Composition
) -> tuple[Node, list[Word], list[Path]]:
    failed = replace(root, value={})
    for_hydra: list[Word] = []
    with initialize(version_base="1.3", config_path=None), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            if any(_may_choose_group(word, composition) for word in words):
                choices = OmegaConf.to_container(
                    compose(file.stem, return_hydra_config=True).hydra.runtime.choices, resolve=False
                )
                assert isinstance(choices, dict)
                for_hydra = [word for word in words if _chooses_group(word, {str(c) for c in choices}, composition)]
                composition.faults.clear()  # the files are read once more
            composed = compose(file.stem, overrides=[word.text for word in for_hydra])
        except MissingConfigException as error:
            composition.faults.append(_missing_option(error, file, for_hydra, composition))
            return failed, [], composition.files
        except (HydraException, OmegaConfBaseException, RecursionError, ValueError, TypeError) as error:
            composition.faults.append(_refusal(error, file, root, for_hydra))
            return failed, [], composition.files
    composition.faults += _warnings(said, file, root)
    tree = composition.filled(OmegaConf.to_container(composed, resolve=False))
    return tree, [word for word in words if word not in for_hydra], list(dict.fromkeys(composition.files))


def _warnings(said: list[warnings.WarningMessage], file: Path, root: Node) -> list[Fault]:
    """What Hydra warns of, as warnings of ours."""
    place = root.value[DEFAULTS].best_place
    found = {}
    for warning in said:
        text = str(warning.message).partition("See https")[0].strip()
        hint = "add `_self_` where this file's own values belong: at the end, they win" if "_self_" in text else ""
        is_main = f"'{file.stem}'" in text
        where = place if is_main else Place(str(file), place.line, place.column)
        found[text] = Fault("defaults-list", text, (DEFAULTS,), where, len(DEFAULTS), [hint], severity="warning")
    return list(found.values())


def _may_choose_group(word: Word, composition: Composition) -> bool:
    key = str(word.parsed.key_or_group)
    return word.parsed.package is not None or "/" in key or ("." not in key and _is_group(key, composition))


def _is_group(key: str, composition: Composition) -> bool:
    return _is_folder(key, composition.folders) or bool(_options(key, composition.schema))


def _is_folder(key: str, folders: list[Path]) -> bool:
    return len(key) <= _MAX_NAME and any((folder / key).is_dir() for folder in folders)


def options_of(key: str, file: Path, folders: list[Path], schema: Schema) -> list[str]:
    """What a group can be set to: files of its folders, and components that fit a slot of that name.

    Args:
        key: The group.
        file: The config file, beside which groups are looked for first.
        folders: Further folders with groups.
        schema: Whose components are options of their slots.
    """
    found = [spec.variant for spec in _options(key, schema) if spec.is_available]
    for folder in (file.parent, *folders, shipped_groups()):
        if _is_folder(key, [folder]):
            found += [entry.stem for entry in (folder / key).iterdir() if entry.suffix in _SUFFIXES]
    return sorted(set(found))


def _chooses_group(word: Word, choices: set[str], composition: Composition) -> bool:
    if not _may_choose_group(word, composition):
        return False
    key = word.parsed.get_key_element().lstrip("+~")
    if key in choices:
        return True
    is_folder = _is_folder(str(word.parsed.key_or_group), composition.folders)
    return is_folder and word.parsed.type in (OverrideType.ADD, OverrideType.FORCE_ADD)


def _missing_option(error: MissingConfigException, file: Path, words: list[Word], composition: Composition) -> Fault:
    wanted = str(error.missing_cfg_file or "")
    group, _, option = wanted.rpartition("/")
    available = [str(name) for name in error.options or []]
    searched = ", ".join(str(folder) for folder in composition.folders)
    if not group:
        available = [file.stem for folder in composition.folders for file in folder.glob("*.y*ml")]
        available += [f"training/{file.stem}" for file in (shipped_groups() / "training").glob("*.yaml")]
    hint = did_you_mean(option, available, f"options of {group}" if group else "config files")
    if group and not available:
        hint = f"there is no group `{group}`: looked for a folder of that name in {searched}"
    chosen = next((w for w in words if str(w.parsed.key_or_group) == group and str(w.parsed.value()) == option), None)
    place, span = Place(str(file), 1, 1), 1
    if chosen is not None:
        place = chosen.place
    else:
        for defaults in composition.lists:
            for _, leaf in defaults.leaves():
                if str(leaf.value) in (option, wanted, f"/{wanted}"):
                    place, span = leaf.place, len(str(leaf.value))
    what = f"the group `{group}` has no option `{option}`" if group else f"there is no config `{option}`"
    return Fault("unknown-option", what, (DEFAULTS,), place, span, [hint])


def _refusal(error: Exception, file: Path, root: Node, words: list[Word]) -> Fault:
    defaults = root.value[DEFAULTS]
    text = " ".join(str(error).split())
    if isinstance(error, RecursionError):
        text = "a config includes itself, directly or through others"
    place = defaults.best_place
    for word in words:
        if str(word.parsed.key_or_group) in text:
            place = word.place
    return Fault("defaults-list", f"the defaults list cannot be composed: {text}", (DEFAULTS,), place)


def _options(slot: str, schema: Schema) -> list[Spec]:
    interfaces, _ = slots_of(child_annotation(schema.recipe, slot))
    return schema.registry.fitting(interfaces) if interfaces else []


class _LocatedFiles(ConfigSource):
    """A folder of YAML files, read with their places."""

    @staticmethod
    def scheme() -> str:
        return "located"

    def _folder(self) -> Path:
        """The folder as the user named it, for messages."""
        folders = _current.get().folders
        return next((folder for folder in folders if folder.resolve() == Path(self.path)), Path(self.path))

    def _file(self, config_path: str) -> Path | None:
        base = self._folder() / config_path
        candidates = [base] if base.suffix in _SUFFIXES else []
        candidates += [base.with_name(base.name + suffix) for suffix in _SUFFIXES]
        return next((file for file in candidates if file.is_file()), None)

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        return (Path(self.path) / config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        return self._file(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        found = []
        for entry in sorted((Path(self.path) / config_path).iterdir()):
            if entry.is_dir() and results_filter in (None, ObjectType.GROUP):
                found.append(entry.name)
            if entry.suffix in _SUFFIXES and results_filter in (None, ObjectType.CONFIG):
                found.append(entry.stem)
        return found

    def load_config(self, config_path: str) -> ConfigResult:
        file = self._file(config_path)
        assert file is not None
        composition = _current.get()
        composition.files.append(file)
        text = file.read_text(encoding="utf-8-sig")
        tree = load_yaml(file, composition.faults)
        defaults = tree.value.pop(DEFAULTS, None)
        content = composition.skeleton(tree)
        if defaults is not None:
            composition.lists.append(defaults)
            content[DEFAULTS] = defaults.plain()
        return ConfigResult(
            config=OmegaConf.create(content),
            path=f"located://{self.path}",
            provider=self.provider,
            header=self._get_header_dict(text),
        )


class _RegistryOptions(ConfigSource):
    """The registry's components as options of the slots that they fit."""

    @staticmethod
    def scheme() -> str:
        return "registry"

    def _spec(self, config_path: str) -> Spec | None:
        slot, _, variant = config_path.removesuffix(".yaml").rpartition("/")
        specs = [spec for spec in _options(slot, _current.get().schema) if spec.variant == variant]
        return specs[0] if len(specs) == 1 else None

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return bool(_options(config_path, _current.get().schema))

    def is_config(self, config_path: str) -> bool:
        return self._spec(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if results_filter is ObjectType.GROUP:
            return []
        return sorted({spec.variant for spec in _options(config_path, _current.get().schema)})

    def load_config(self, config_path: str) -> ConfigResult:
        spec = self._spec(config_path)
        assert spec is not None
        composition = _current.get()
        place = Place(origin=f"option `{spec.variant}` of the defaults list")
        entry = Node({COMPONENT_KEY: Node(spec.kind, place), VARIANT_KEY: Node(spec.variant, place)}, place, place)
        return ConfigResult(
            config=OmegaConf.create(composition.skeleton(entry)),
            path="registry://",
            provider=self.provider,
            header={"package": None},
        )


class _SearchPath(SearchPathPlugin):
    """Tells Hydra the folders of the current composition; does nothing in anybody else's application."""

    def manipulate_search_path(self, search_path: Any) -> None:
        composition = _current.get(None)
        if composition is None:
            return
        for index, folder in enumerate(composition.folders):
            search_path.append(f"folder-{index}", f"located://{folder.resolve()}")
        search_path.append("modalities", "registry://")


def _register_sources() -> None:
    plugins = Plugins.instance()
    known = {plugin.__name__ for plugin in plugins.discover()}
    for plugin in (_LocatedFiles, _RegistryOptions, _SearchPath):
        if plugin.__name__ not in known:
            plugins.register(plugin)
