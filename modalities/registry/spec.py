"""What is known of a component without importing it, and the door sign on which it stands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel

from modalities.config.tree import Node
from modalities.exceptions import ModalitiesError
from modalities.registry.fields import annotations_of, load_object
from modalities.registry.interfaces import Interface

C = TypeVar("C", bound=type[BaseModel])


@dataclass(frozen=True)
class SameAs:
    """``provides=SameAs("model")``: the component gives back what stood in its field, wrapped or changed in place."""

    field: str


@dataclass(frozen=True)
class Rename:
    """A field's present name, for files that use an older one.

    Args:
        to: The present name.
        convert: Turns the older value into the present one, if its shape has changed too.
    """

    to: str
    convert: Callable[[Node], Node] | None = None


@dataclass(frozen=True)
class Spec:
    """All that is known of a component without importing it.

    Args:
        kind: Its component key.
        variant: Its variant key.
        config: Schema of its fields.
        builds: The class or function that takes the fields, or ``"module:name"`` of it; None as long as the component
            is known from existing files, but not available.
        provides: What it gives.
        where: Who registered it.
        wraps: Fields whose components it wraps: what it does not have itself is looked for there.
        names: Names that the built component has inside, by what they name; see :class:`~.fields.NamesOf`.
        renamed: Older names of fields.
        removed: Fields of older files that are left out, each with the reason.
        takes_over: When it replaces another variant: where the other keeps what a field of this one holds,
            ``{"k": ("checkpoint_saving_strategy/save_k_most_recent_checkpoints_strategy.k",)}``.
    """

    kind: str
    variant: str
    config: type[BaseModel]
    builds: str | Callable[..., Any] | None
    provides: type[Interface] | SameAs
    where: str
    wraps: tuple[str, ...] = ()
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renamed: Mapping[str, Rename] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)
    takes_over: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.variant}"

    @property
    def summary(self) -> str:
        """First line of the schema's docstring."""
        return (inspect.getdoc(self.config) or "").partition("\n")[0]

    @property
    def is_available(self) -> bool:
        return self.builds is not None

    @property
    def wrapped_fields(self) -> tuple[str, ...]:
        """The fields whose components shine through."""
        return self.wraps or ((self.provides.field,) if isinstance(self.provides, SameAs) else ())

    def annotations(self) -> dict[str, Any]:
        """Field names and aliases, each with its annotation."""
        return annotations_of(self.config)

    def builder(self) -> Callable[..., Any]:
        """Import the class or function that builds the component.

        Raises:
            ModalitiesError: The component is not available yet; a plan says so first.
        """
        if self.builds is None:
            raise ModalitiesError(f"{self.name} is not available yet")
        return load_object(self.builds) if isinstance(self.builds, str) else self.builds


class Sign:
    """The door sign of a folder of components: ``sign = Sign()`` in its ``components.py``, one entry each."""

    def __init__(self) -> None:
        self.specs: list[Spec] = []
        self.renamed_variants: dict[tuple[str, str], str] = {}

    def component(
        self,
        kind: str,
        variant: str,
        *,
        builds: str | None,
        provides: type[Interface] | SameAs,
        wraps: tuple[str, ...] = (),
        names: Mapping[str, tuple[str, ...]] | None = None,
        renamed: Mapping[str, Rename] | None = None,
        removed: Mapping[str, str] | None = None,
        takes_over: Mapping[str, tuple[str, ...]] | None = None,
    ) -> Callable[[C], C]:
        """Class decorator for the schema of a component; the arguments are those of :class:`Spec`."""

        def register(config: C) -> C:
            where = f"{config.__module__}:{config.__qualname__}"
            spec = Spec(
                kind,
                variant,
                config,
                builds,
                provides,
                where,
                wraps,
                names or {},
                renamed or {},
                removed or {},
                takes_over or {},
            )
            self.specs.append(spec)
            return config

        return register

    def renamed_variant(self, kind: str, old: str, new: str) -> None:
        """Existing files may call a variant by an older name."""
        self.renamed_variants[kind, old] = new
