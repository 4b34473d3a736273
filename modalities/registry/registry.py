"""The map from (component key, variant key) to a component's spec."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, create_model

from modalities.exceptions import RegistrationError
from modalities.registry.fields import ComponentConfig, annotations_of, load_object
from modalities.registry.interfaces import Anything, Interface

SIGNS = (
    "modalities.models.components",
    "modalities.data.components",
    "modalities.optim.components",
    "modalities.parallel.components",
    "modalities.checkpointing.components",
    "modalities.tracking.components",
    "modalities.training.components",
)
"""The ``components.py`` door signs that make up the standard registry; none of them imports torch."""

C = TypeVar("C", bound=type[BaseModel])
T = TypeVar("T")


@dataclass(frozen=True)
class SameAs:
    """``provides=SameAs("model")``: the component gives back what stood in its field, wrapped or changed in place."""

    field: str


@dataclass(frozen=True)
class Spec:
    """All that is known of a component without importing it.

    Args:
        kind: Its component key.
        variant: Its variant key.
        config: Schema of its fields.
        builds: The class or function that takes the fields, or ``"module:name"`` of it.
        provides: What it gives.
        where: Who registered it.
    """

    kind: str
    variant: str
    config: type[BaseModel]
    builds: str | Callable[..., Any]
    provides: type[Interface] | SameAs
    where: str

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.variant}"

    @property
    def summary(self) -> str:
        """First line of the schema's docstring."""
        return (inspect.getdoc(self.config) or "").partition("\n")[0]

    def annotations(self) -> dict[str, Any]:
        """Field names and aliases, each with its annotation."""
        return annotations_of(self.config)

    def builder(self) -> Callable[..., Any]:
        """Import the class or function that builds the component."""
        return load_object(self.builds) if isinstance(self.builds, str) else self.builds


class Sign:
    """The door sign of a folder of components: ``sign = Sign()`` in its ``components.py``, one entry each."""

    def __init__(self) -> None:
        self.specs: list[Spec] = []

    def component(
        self, kind: str, variant: str, *, builds: str, provides: type[Interface] | SameAs
    ) -> Callable[[C], C]:
        """Class decorator for the schema of a component.

        Args:
            kind: Component key.
            variant: Variant key.
            builds: ``"module:name"`` of the class or function that takes the schema's fields as keyword arguments.
            provides: The interface that it gives, or :class:`SameAs` a field.
        """

        def register(config: C) -> C:
            where = f"{config.__module__}:{config.__qualname__}"
            self.specs.append(Spec(kind, variant, config, builds, provides, where))
            return config

        return register


class Registry:
    """Specs by (component key, variant key); refuses a pair that is taken."""

    def __init__(self) -> None:
        self._specs: dict[tuple[str, str], Spec] = {}

    @classmethod
    def standard(cls) -> Registry:
        """A fresh registry with every component that modalities ships and every ``@register``-ed one."""
        registry = cls()
        for module_name in SIGNS:
            for spec in importlib.import_module(module_name).sign.specs:
                registry.add_spec(spec)
        for spec in _registered:
            registry.add_spec(spec)
        return registry

    def __iter__(self) -> Iterator[Spec]:
        return iter(self._specs.values())

    def __len__(self) -> int:
        return len(self._specs)

    def get(self, kind: str, variant: str) -> Spec | None:
        return self._specs.get((kind, variant))

    def kinds(self) -> list[str]:
        return sorted({kind for kind, _ in self._specs})

    def variants(self, kind: str) -> list[str]:
        return sorted(variant for k, variant in self._specs if k == kind)

    def add_spec(self, spec: Spec) -> None:
        taken = self._specs.get((spec.kind, spec.variant))
        if taken is not None:
            raise RegistrationError(
                f"{spec.name} is registered twice: by {taken.where} and by {spec.where}. "
                "Give one of them another variant key."
            )
        self._specs[spec.kind, spec.variant] = spec

    def add(
        self,
        kind: str,
        variant: str,
        builds: Callable[..., Any],
        config: type[BaseModel] | None = None,
        provides: type[Interface] = Anything,
    ) -> None:
        """Add a component of one's own.

        Args:
            kind: Component key, an existing or a new one.
            variant: Variant key.
            builds: Class or function that is called with the fields.
            config: Schema of the fields; read off the signature of ``builds`` if not given.
            provides: The interface that it gives; checked once built.

        Raises:
            RegistrationError: The pair is taken, or the signature cannot serve as a schema.
        """
        self.add_spec(_spec_of(kind, variant, builds, config, provides))


_registered: list[Spec] = []


def register(kind: str, variant: str, *, provides: type[Interface] = Anything) -> Callable[[T], T]:
    """Decorator: make an annotated class or function a component; its signature is its schema.

    Raises:
        RegistrationError: A parameter has no annotation, or takes ``*args``/``**kwargs``.
    """

    def decorate(builds: T) -> T:
        _registered.append(_spec_of(kind, variant, typing.cast(Callable[..., Any], builds), None, provides))
        return builds

    return decorate


def _spec_of(
    kind: str, variant: str, builds: Callable[..., Any], config: type[BaseModel] | None, provides: type[Interface]
) -> Spec:
    where = f"{builds.__module__}:{builds.__qualname__}"
    return Spec(kind, variant, config or _schema_of(builds, where), builds, provides, where)


def _schema_of(builds: Callable[..., Any], where: str) -> type[BaseModel]:
    target = builds.__init__ if inspect.isclass(builds) else builds
    hints = typing.get_type_hints(target, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(builds).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise RegistrationError(f"{where}: `{name}` has no fixed name; give each field a parameter of its own")
        if name not in hints:
            raise RegistrationError(f"{where}: parameter `{name}` needs a type annotation to serve as a field")
        fields[name] = (hints[name], ... if parameter.default is parameter.empty else parameter.default)
    schema: type[BaseModel] = create_model(
        f"{builds.__name__}Config", __base__=ComponentConfig, __doc__=inspect.getdoc(builds), **fields
    )
    return schema
