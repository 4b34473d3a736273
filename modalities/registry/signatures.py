"""A component's schema and interface, read off an annotated class or function."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any

from pydantic import BaseModel, PydanticSchemaGenerationError, TypeAdapter, create_model
from pydantic.errors import PydanticUndefinedAnnotation

from modalities.exceptions import RegistrationError
from modalities.registry.fields import ComponentConfig, enum_field, slot
from modalities.registry.interfaces import Anything, Interface


def schema_of(builds: Callable[..., Any], where: str) -> type[BaseModel]:
    """The schema of a component's fields: the parameters of its class or function.

    A parameter annotated with a class that YAML cannot spell takes a component that gives an instance of it.

    Raises:
        RegistrationError: A parameter has no annotation, or no fixed name.
    """
    target = builds.__init__ if inspect.isclass(builds) else builds
    try:
        hints = typing.get_type_hints(target, include_extras=True)
    except NameError as error:
        raise RegistrationError(f"{where}: an annotation cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(builds).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise RegistrationError(f"{where}: `{name}` has no fixed name; give each field a parameter of its own")
        if name not in hints:
            raise RegistrationError(f"{where}: parameter `{name}` needs a type annotation to serve as a field")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (_field_annotation(hints[name]), default)
    schema: type[BaseModel] = create_model(
        f"{builds.__name__}Config", __base__=ComponentConfig, __doc__=inspect.getdoc(builds), **fields
    )
    return schema


def provided_by(builds: Callable[..., Any]) -> type[Interface]:
    """The interface that a class, or a function's annotated result, has."""
    given: Any = builds if inspect.isclass(builds) else typing.get_type_hints(builds).get("return")
    if not isinstance(given, type) or given is type(None) or _is_spelled_in_yaml(given):
        return Anything
    return interface_of(given)


_made: dict[type, type[Interface]] = {}


def interface_of(cls: type) -> type[Interface]:
    """The stand-in of a class: a known one, or a new one below those of its bases."""
    known = _known_interfaces() | _made
    if cls in known:
        return known[cls]
    bases = [known[base] for base in cls.__mro__ if base in known]
    nearest = [base for base in bases if not any(other is not base and issubclass(other, base) for other in bases)]
    _made[cls] = type(cls.__name__, tuple(nearest) or (Interface,), {"runtime": cls})
    return _made[cls]


def _known_interfaces() -> dict[type, type[Interface]]:
    """Runtime types that are imported already, each with its stand-in; a class cannot derive from any other."""
    found: dict[type, type[Interface]] = {}
    waiting = list(Interface.__subclasses__())
    while waiting:
        interface = waiting.pop()
        waiting += interface.__subclasses__()
        if not isinstance(interface.runtime, str):
            continue
        module_name, _, name = interface.runtime.partition(":")
        runtime = getattr(sys.modules.get(module_name), name, None)
        if inspect.isclass(runtime) and runtime.__module__ != "builtins":
            found[runtime] = interface
    return found


def _field_annotation(annotation: Any) -> Any:
    """The annotation with classes that only a component can give replaced by slots."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(_field_annotation(a) for a in arguments)]  # noqa: UP007 - made at run time
    if origin in (list, tuple, dict) and arguments:
        return origin[tuple(a if a is ... else _field_annotation(a) for a in arguments)]
    if not isinstance(annotation, type) or origin is not None:
        return annotation
    if issubclass(annotation, Enum):
        return enum_field(annotation)
    if annotation is type(None) or _is_spelled_in_yaml(annotation):
        return annotation
    return slot(interface_of(annotation))


def _is_spelled_in_yaml(cls: type) -> bool:
    try:
        TypeAdapter(cls)
    except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation):
        return False
    return True
