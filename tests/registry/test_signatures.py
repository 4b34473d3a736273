"""A component's schema and interface, read off its signature."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from modalities.checkpointing.interfaces import CheckpointSavingExecutionABC
from modalities.exceptions import RegistrationError
from modalities.registry.fields import Pending, slots_of
from modalities.registry.interfaces import Anything, CheckpointSavingExecution, Model, Optimizer
from modalities.registry.registry import Registry
from modalities.registry.signatures import interface_of, provided_by, schema_of
from modalities.training.losses import CLMCrossEntropyLoss, Loss


class Colour(Enum):
    RED = "r"
    BLUE = "b"


class Engine:
    def __init__(self, power: int) -> None:
        self.power = power


class Turbine(Engine):
    pass


class Ship:
    """A ship."""

    def __init__(
        self,
        engine: Engine,
        spare: Engine | None = None,
        others: list[Engine] = (),  # type: ignore[assignment]
        path: Path = Path("log"),
        colour: Colour = Colour.RED,
        model: nn.Module | None = None,
    ) -> None: ...


def test_classes_that_yaml_cannot_spell_are_slots() -> None:
    fields = schema_of(Ship, "here").model_fields
    engine = interface_of(Engine)
    assert slots_of(_annotation(fields, "engine"))[0] == (engine,)
    assert slots_of(_annotation(fields, "spare"))[0] == (engine,)
    assert slots_of(slots_of(_annotation(fields, "others"))[1])[0] == (engine,)
    assert slots_of(_annotation(fields, "model"))[0] == (Model,)
    assert slots_of(_annotation(fields, "path"))[0] == ()


def _annotation(fields: Any, name: str) -> Any:
    from typing import Annotated

    field = fields[name]
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def test_a_subclass_fits_where_its_base_is_wanted() -> None:
    schema = schema_of(Ship, "here")
    turbine, other = Pending(interface_of(Turbine), ("t",), "t"), Pending(Optimizer, ("o",), "o")
    schema(engine=turbine, colour="BLUE")
    with pytest.raises(ValidationError, match="needs Engine"):
        schema(engine=other)
    with pytest.raises(ValidationError, match="must be one of RED, BLUE"):
        schema(engine=turbine, colour="green")


def _optimizer(lr: float) -> torch.optim.Optimizer: ...


def _number(x: int) -> int: ...


def _nothing(x: int) -> None: ...


@pytest.mark.parametrize(
    ("builds", "interface"),
    [(_optimizer, Optimizer), (_number, Anything), (_nothing, Anything), (lambda: 1, Anything), (nn.Linear, None)],
)
def test_what_is_provided_is_told_by_the_class_or_the_result(builds: Any, interface: Any) -> None:
    found = provided_by(builds)
    assert issubclass(found, Model) if interface is None else found is interface


class Saving(CheckpointSavingExecutionABC):
    """Of one's own."""


class Halved(CLMCrossEntropyLoss):
    """Of one's own."""


def test_a_class_of_a_known_kind_is_an_option_of_its_slot() -> None:
    registry = Registry.standard()
    registry.add("checkpoint_saving_execution", "mine", Saving)
    registry.add("loss", "halved", Halved)
    assert "mine" in [spec.variant for spec in registry.fitting((CheckpointSavingExecution,))]
    assert "halved" in [spec.variant for spec in registry.fitting((interface_of(Loss),))]


def test_what_cannot_serve_as_a_schema_is_refused() -> None:
    def starred(*parts: int) -> None: ...

    def bare(x) -> None: ...  # type: ignore[no-untyped-def]

    def unknown(x: NoSuchName) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    for builds, message in ((starred, "no fixed name"), (bare, "needs a type annotation"), (unknown, "cannot be read")):
        with pytest.raises(RegistrationError, match=message):
            schema_of(builds, "here")
