"""Building blocks of a component's fields: slots for other components, enums by name, files that must exist."""

from __future__ import annotations

import importlib
import types
import typing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, TypeGuard, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from modalities.config.tree import Sentinel
from modalities.registry.interfaces import Anything, Interface
from modalities.registry.rules import Rule


class ComponentConfig(BaseModel):
    """Base of all component schemas: unknown fields are refused, numbers must be finite."""

    model_config = ConfigDict(
        defer_build=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        populate_by_name=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    """What must hold between several fields."""


@dataclass(frozen=True)
class DefaultFrom:
    """Where a field's value comes from if it is not given: the first of these places that is there.

    A place is the dotted path of a value (``settings.experiment_id``; it passes through references and wrappers), the
    name of a top-level component, which is then shared (``optimizer``), or an expression (``${cuda_env:RANK}``).
    """

    places: tuple[str, ...]

    def __init__(self, *places: str) -> None:
        object.__setattr__(self, "places", places)


@dataclass(frozen=True)
class NamesOf:
    """The texts of a field name things inside another component, which lists them in its spec's ``names``.

    Args:
        what: What is named, such as ``modules``.
        of: The field that holds the other component, bare or wrapped.
    """

    what: str
    of: str


@dataclass(frozen=True)
class Pending:
    """Stands for a component's instance as long as nothing is built.

    Args:
        provides: The interface that the instance will have.
        path: Place of the component in the canonical tree, its identity.
        label: How a message calls it.
    """

    provides: type[Interface]
    path: tuple[str | int, ...]
    label: str

    def __repr__(self) -> str:
        return f"<{self.label}>"


def load_object(reference: str) -> Any:
    """Import what ``"module:name"`` refers to."""
    module_name, _, attribute = reference.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def satisfies(value: Any, interface: type[Interface]) -> bool:
    """Whether a built object is an instance of the runtime type behind an interface."""
    runtime = load_object(interface.runtime) if isinstance(interface.runtime, str) else interface.runtime
    return runtime is None or isinstance(value, runtime)


@dataclass(frozen=True)
class Slot:
    """Pydantic marker: here stands a component that provides ``interface``."""

    interface: type[Interface]

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def _check(self, value: Any) -> Any:
        name = self.interface.__name__
        if isinstance(value, Pending):
            if value.provides is Anything or issubclass(value.provides, self.interface):
                return value
            raise PydanticCustomError(
                "interface",
                "needs {want}, got {got}",
                {"want": name, "got": f"{value.label} ({value.provides.__name__})"},
            )
        if isinstance(value, Sentinel):
            return value
        if value is None or isinstance(value, str | int | float | bool | dict | list | tuple):
            raise PydanticCustomError("not_component", "needs a component that provides {want}", {"want": name})
        if not satisfies(value, self.interface):
            raise PydanticCustomError(
                "interface", "needs {want}, got {got}", {"want": name, "got": type(value).__name__}
            )
        return value


M = TypeVar("M")

if TYPE_CHECKING:
    T = TypeVar("T")
    Instance: TypeAlias = Annotated[T, "slot"]
else:

    class Instance:
        """``Instance[Model]``: a field that takes a component providing ``Model``."""

        def __class_getitem__(cls, interface: type[Interface]) -> Any:
            return slot(interface)


def _enum_member(enum: type[Enum]) -> typing.Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if isinstance(value, enum):
            return value
        if isinstance(value, str) and value in enum.__members__:
            return enum[value]
        for member in enum:
            # a bool is an int to Python, but no number to the user
            if member.value == value and not isinstance(value, bool):
                return member
        raise PydanticCustomError("enum", "must be one of {allowed}", {"allowed": ", ".join(enum.__members__)})

    return convert


def slot(interface: type[Interface]) -> Any:
    """The annotation of a field that takes a component providing the interface."""
    return Annotated[Any, Slot(interface)]


def enum_field(enum: type[Enum]) -> Any:
    """The annotation of a field that takes an enum's member by its name or value."""
    return Annotated[enum, BeforeValidator(_enum_member(enum))]


if TYPE_CHECKING:
    EnumField: TypeAlias = Annotated[T, "enum"]
else:

    class EnumField:
        """``EnumField[Precision]``: an enum that the YAML spells by member name or by value."""

        def __class_getitem__(cls, enum: type[Enum]) -> Any:
            return enum_field(enum)


def _existing(path: Path) -> Path:
    _named(path)
    if not path.exists():
        raise PydanticCustomError("path_not_found", "no such file or folder: {path}", {"path": str(path)})
    return path


def _named(path: Path) -> None:
    if path == Path():
        raise PydanticCustomError("path_not_found", "no file is named")


def _existing_file(path: Path) -> Path:
    _named(path)
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "no such file"
        raise PydanticCustomError("path_not_found", "{what}: {path}", {"what": what, "path": str(path)})
    return path


ExistingPath = Annotated[Path, AfterValidator(_existing)]
"""A file or folder that must be there when the config is checked."""

ExistingFile = Annotated[Path, AfterValidator(_existing_file)]
"""A file that must be there when the config is checked."""


def bare(annotation: Any) -> Any:
    """An annotation without its markers."""
    while hasattr(annotation, "__metadata__"):
        annotation = annotation.__origin__
    return annotation


def is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    """Whether an annotation is a pydantic model, a mapping with fields of its own."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def marker_of(annotation: Any, marker: type[M]) -> M | None:
    """The first marker of that kind in an annotation."""
    return next((m for m in getattr(annotation, "__metadata__", ()) if isinstance(m, marker)), None)


def slots_of(annotation: Any) -> tuple[tuple[type[Interface], ...], Any]:
    """Which interfaces an annotation accepts directly, and the annotation of its items if it is a list."""
    direct = [m.interface for m in getattr(annotation, "__metadata__", ()) if isinstance(m, Slot)]
    annotation = bare(annotation)
    item = None
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        for option in typing.get_args(annotation):
            more, option_item = slots_of(option)
            direct += more
            item = item or option_item
    elif origin in (list, tuple, set):
        arguments = typing.get_args(annotation)
        item = arguments[0] if arguments else None
    return tuple(direct), item


def child_annotation(annotation: Any, key: str | int) -> Any:
    """The annotation one level down, through nested models, unions, lists and dicts; None where there is none."""
    annotation = bare(annotation)
    if is_section(annotation):
        return annotations_of(annotation).get(str(key))
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return next((found for a in arguments if (found := child_annotation(a, key)) is not None), None)
    if origin in (list, tuple) and isinstance(key, int) and arguments:
        return arguments[0]
    return arguments[1] if origin is dict else None


def annotations_of(model: type[BaseModel]) -> dict[str, Any]:
    """Field names and aliases of a model, each with its full annotation.

    A recipe's ``shared`` entries count: they have a kind, and are built if something refers to them.
    """
    found: dict[str, Any] = dict(getattr(model, "shared", {}))
    for name, field in model.model_fields.items():
        annotation = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        for alias in names_of(name, field):
            found[alias] = annotation
    return found


def names_of(name: str, field: Any) -> list[str]:
    """Every spelling under which a field may be given: its name, then its aliases."""
    alias = field.validation_alias
    choices = [alias] if isinstance(alias, str) else list(getattr(alias, "choices", []))
    return list(dict.fromkeys([name, *(c for c in choices if isinstance(c, str))]))
