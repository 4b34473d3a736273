"""The map from (component key, variant key) to a component's spec."""

from __future__ import annotations

import importlib
import importlib.metadata
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel

from modalities.exceptions import RegistrationError, UserError
from modalities.registry.interfaces import Anything, Interface
from modalities.registry.signatures import provided_by, schema_of
from modalities.registry.spec import SameAs, Spec

SIGNS = (
    "modalities.models.components",
    "modalities.data.components",
    "modalities.optim.components",
    "modalities.parallel.components",
    "modalities.checkpointing.components",
    "modalities.tracking.components",
    "modalities.training.components",
    "modalities.inference.components",
    "modalities.models.upcoming",
    "modalities.data.upcoming",
    "modalities.parallel.upcoming",
    "modalities.tracking.upcoming",
)
"""The door signs that make up the standard registry, what is available first; none of them imports torch."""

ENTRY_POINTS = "modalities.components"
"""Entry-point group of packages that bring components: each names a module that registers them."""

T = TypeVar("T")


class Registry:
    """Specs by (component key, variant key); refuses a pair that is taken."""

    def __init__(self) -> None:
        self._specs: dict[tuple[str, str], Spec] = {}
        self._renamed_variants: dict[tuple[str, str], str] = {}

    @classmethod
    def standard(cls) -> Registry:
        """A fresh registry: what modalities ships, what installed packages bring, what is ``@register``-ed.

        Raises:
            UserError: An installed package's components cannot be imported.
            RegistrationError: Two components have the same name.
        """
        registry = cls()
        for module_name in SIGNS:
            sign = importlib.import_module(module_name).sign
            for spec in sign.specs:
                registry.add_spec(spec)
            registry._renamed_variants |= sign.renamed_variants
        _load_entry_points()
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

    def renamed_variant(self, kind: str, variant: str) -> str | None:
        """The present name of a variant, if it has been renamed."""
        return self._renamed_variants.get((kind, variant))

    def fitting(self, interfaces: tuple[type[Interface], ...], *, known_only: bool = False) -> list[Spec]:
        """Components that can stand where one of the interfaces is wanted.

        What a wrapper or a user's function gives is known only once it is built: it fits where its kind does.

        Args:
            interfaces: What the place takes.
            known_only: Leave those out.
        """
        fits = [s for s in self if not isinstance(s.provides, SameAs) and issubclass(s.provides, interfaces)]
        if known_only:
            return fits
        kinds = {spec.kind for spec in fits}
        return [spec for spec in self if spec in fits or (_is_open(spec) and spec.kind in kinds)]

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
        provides: type[Interface] | SameAs | None = None,
    ) -> None:
        """Add a component of one's own.

        Args:
            kind: Component key, an existing or a new one.
            variant: Variant key.
            builds: Class or function that is called with the fields.
            config: Schema of the fields; read off the signature of ``builds`` if not given.
            provides: The interface that it gives, checked once built; by default what its class or return type tells.

        Raises:
            RegistrationError: The pair is taken, or the signature cannot serve as a schema.
        """
        self.add_spec(_spec_of(kind, variant, builds, config, provides))


_registered: list[Spec] = []


def register(kind: str, variant: str, *, provides: type[Interface] | SameAs | None = None) -> Callable[[T], T]:
    """Decorator: make an annotated class or function a component; its signature is its schema.

    Args:
        kind: Component key, an existing or a new one.
        variant: Variant key.
        provides: The interface that it gives; by default what its class or return type tells.

    Raises:
        RegistrationError: A parameter has no annotation, or takes ``*args``/``**kwargs``.
    """

    def decorate(builds: T) -> T:
        _registered.append(_spec_of(kind, variant, typing.cast(Callable[..., Any], builds), None, provides))
        return builds

    return decorate


def _spec_of(
    kind: str,
    variant: str,
    builds: Callable[..., Any],
    config: type[BaseModel] | None,
    provides: type[Interface] | SameAs | None,
) -> Spec:
    where = f"{builds.__module__}:{builds.__qualname__}"
    return Spec(kind, variant, config or schema_of(builds, where), builds, provides or provided_by(builds), where)


def _is_open(spec: Spec) -> bool:
    return isinstance(spec.provides, SameAs) or spec.provides is Anything


def _load_entry_points() -> None:
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            entry_point.load()
        except Exception as error:
            package = entry_point.dist.name if entry_point.dist else "a package"
            raise UserError(
                f"the components of {package} ({entry_point.value}) cannot be imported: {type(error).__name__}: {error}; "
                f"mend or uninstall {package}"
            ) from error
