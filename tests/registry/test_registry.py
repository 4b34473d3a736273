"""The map of components, standard ones and users' own."""

from __future__ import annotations

import inspect
import subprocess
import sys
from enum import Enum

import pytest
from pydantic import ValidationError

from modalities.exceptions import RegistrationError
from modalities.registry.fields import ComponentConfig, EnumField, Instance, Pending
from modalities.registry.interfaces import Loss, Model, Optimizer
from modalities.registry.registry import Registry

STANDARD = Registry.standard()


def test_collecting_the_standard_components_imports_nothing_heavy() -> None:
    program = (
        "import sys; from modalities.registry.registry import Registry; assert len(Registry.standard()) > 50; "
        "print([m for m in ('torch', 'numpy', 'transformers', 'wandb', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("spec", list(STANDARD), ids=lambda spec: spec.name)
def test_a_door_sign_tells_the_truth(spec: object) -> None:
    assert spec.summary  # type: ignore[attr-defined]
    fields = spec.config.model_fields  # type: ignore[attr-defined]
    assert [name for name, field in fields.items() if not field.description] == []
    parameters = inspect.signature(spec.builder()).parameters  # type: ignore[attr-defined]
    assert set(fields) <= set(parameters)
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    assert needed <= set(fields)


def test_every_component_of_existing_configs_that_this_version_has_keeps_its_name() -> None:
    names = {spec.name for spec in STANDARD}
    assert {
        "checkpoint_saving/default",
        "checkpoint_saving_execution/dcp",
        "checkpoint_saving_execution/fsdp1",
        "checkpoint_saving_strategy/save_k_most_recent_checkpoints_strategy",
        "checkpoint_saving_strategy/save_every_k_steps_checkpointing_strategy",
        "checkpoint_loading/dcp",
        "checkpoint_loading/fsdp1",
        "checkpoint_loading/torch",
        "app_state/raw",
        "app_state/dcp",
        "model/gpt2",
        "model/fsdp1_wrapped",
        "model/fsdp2_wrapped",
        "model/fsdp1_checkpointed",
        "model/model_initialized",
        "model_initialization/composed",
        "model_initialization/gpt2_llama3_like",
        "optimizer/adam",
        "optimizer/adam_w",
        "scheduler/onecycle_lr",
    } <= names


class _Loss:
    def __init__(self, weight: float, tag: str = "mine") -> None:
        self.weight, self.tag = weight, tag


def test_a_signature_is_a_schema() -> None:
    registry = Registry()
    registry.add("loss", "mine", _Loss)
    spec = registry.get("loss", "mine")
    assert spec is not None
    assert spec.config(weight="2").weight == 2.0  # type: ignore[attr-defined]
    with pytest.raises(ValidationError):
        spec.config(weight=1, other=2)


def test_a_pair_registered_twice_names_both_places() -> None:
    registry = Registry.standard()
    with pytest.raises(RegistrationError, match=r"CLMCrossEntropyLossConfig.*_Loss"):
        registry.add("loss", "clm_cross_entropy_loss", _Loss)


def test_signatures_that_are_no_schema_are_refused() -> None:
    def untyped(x) -> None: ...  # type: ignore[no-untyped-def]

    def loose(**fields: int) -> None: ...

    for builds, told in ((untyped, "`x` needs a type annotation"), (loose, "`fields` has no fixed name")):
        with pytest.raises(RegistrationError, match=told):
            Registry().add("loss", "x", builds)


class _Colour(Enum):
    RED = "1"
    BLUE = "2"


class _Fields(ComponentConfig):
    colour: EnumField[_Colour] = _Colour.RED
    model: Instance[Model] | None = None


@pytest.mark.parametrize("spelling", ["BLUE", "2", _Colour.BLUE])
def test_enums_are_spelled_by_name_or_value(spelling: object) -> None:
    assert _Fields(colour=spelling).colour is _Colour.BLUE


def test_a_wrong_enum_lists_the_names() -> None:
    with pytest.raises(ValidationError, match="RED, BLUE"):
        _Fields(colour="GREEN")


def test_a_slot_takes_what_provides_its_interface_only() -> None:
    assert _Fields(model=Pending(Model, ("m",), "m")).model is not None
    for wrong in (Pending(Loss, ("l",), "`l` = loss/x"), Pending(Optimizer, ("o",), "o"), "text", 3):
        with pytest.raises(ValidationError, match="needs"):
            _Fields(model=wrong)
