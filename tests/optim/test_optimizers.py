from __future__ import annotations

import inspect

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from modalities.exceptions import UserError
from modalities.factory.rules import broken_rule
from modalities.optim.components import AdamWConfig, sign
from modalities.optim.optimizers import make_adam, make_adam_w, parameter_groups
from modalities.registry.fields import load_object


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight_decay_groups = {"linear": ["^linear"], "embedding": ["^embedding"], "layernorm": ["^norm"]}
        self.embedding = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(self.embedding(ids)))


FIELDS = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "foreach": None, "fused": None}


@pytest.mark.parametrize("spec", sign.specs, ids=lambda spec: spec.name)
def test_fields_are_the_parameters_of_the_builder(spec) -> None:
    parameters = inspect.signature(load_object(spec.builds)).parameters
    assert set(spec.config.model_fields) == set(parameters)
    assert spec.summary
    assert all(field.description for field in spec.config.model_fields.values())


def test_decayed_parameters_come_first() -> None:
    model = Tiny()
    decayed, spared = parameter_groups(model, 0.1, ["embedding", "layernorm"])
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert [id(p) for p in decayed["params"]] == [id(p) for p in model.linear.parameters()]
    assert len(spared["params"]) == 3


def test_one_group_if_nothing_or_everything_is_excluded() -> None:
    assert len(parameter_groups(Tiny(), 0.1, [])) == 1
    (group,) = parameter_groups(Tiny(), 0.1, ["linear", "embedding", "layernorm"])
    assert group["weight_decay"] == 0.0


def test_names_are_cleaned_and_frozen_parameters_left_out() -> None:
    model = Tiny()
    model.embedding.weight.requires_grad_(False)
    wrapped = torch.compile(model, backend="eager")
    (group,) = parameter_groups(wrapped, 0.1, [])
    assert len(group["params"]) == 4


def test_parts_of_a_model() -> None:
    decayed, spared = parameter_groups([Tiny(), Tiny()], 0.1, ["embedding"])
    assert (len(decayed["params"]), len(spared["params"])) == (8, 2)


def test_an_unknown_group_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="no group `embeding`; did you mean `embedding`"):
        parameter_groups(Tiny(), 0.1, ["embeding"])


@pytest.mark.parametrize(
    ("groups", "message"),
    [({"linear": ["^linear"]}, "in no weight-decay group"), ({"a": ["."], "b": ["bias"]}, r"several .*\(a, b\)")],
)
def test_every_parameter_is_in_one_group(groups, message) -> None:
    model = Tiny()
    model.weight_decay_groups = groups
    with pytest.raises(UserError, match=message):
        parameter_groups(model, 0.1, [])


def test_a_model_without_groups_can_decay_as_a_whole() -> None:
    assert len(parameter_groups(nn.Linear(2, 2), 0.1, [])[0]["params"]) == 2
    with pytest.raises(UserError, match="no attribute weight_decay_groups"):
        parameter_groups(nn.Linear(2, 2), 0.1, ["layernorm"])


def test_parameters_without_memory_are_refused() -> None:
    with pytest.raises(UserError, match="model_initialized"):
        parameter_groups(Tiny().to("meta"), 0.1, [])


@pytest.mark.parametrize(
    ("foreach", "fused", "expected"),
    [(None, None, True), (True, None, None), (False, None, True), (None, False, False), (None, True, True)],
)
def test_fused_is_the_default(foreach, fused, expected) -> None:
    fields = FIELDS | {"foreach": foreach, "fused": fused}
    optimizer = make_adam_w(wrapped_model=Tiny(), weight_decay=0.1, weight_decay_groups_excluded=[], **fields)
    assert optimizer.param_groups[0]["fused"] is expected


@pytest.mark.parametrize(("make", "change"), [(make_adam_w, 0.1 * 0.5 * 1.0), (make_adam, 0.1)])
def test_only_the_decayed_group_shrinks(make, change) -> None:
    model = Tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    optimizer = make(
        wrapped_model=model, weight_decay=0.5, weight_decay_groups_excluded=["embedding", "layernorm"], **FIELDS
    )
    optimizer.step()
    torch.testing.assert_close(model.linear.weight.detach(), torch.full((4, 4), 1 - change))
    assert bool((model.embedding.weight == 1).all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"betas": [0.9]}, "betas"), ({"betas": [0.9, 1.0]}, "less than 1")],
)
def test_fields_out_of_range(changes, message) -> None:
    fields = FIELDS | {"wrapped_model": Tiny(), "weight_decay": 0.1, "weight_decay_groups_excluded": []}
    AdamWConfig(**fields)
    with pytest.raises(ValidationError, match=message):
        AdamWConfig(**fields | changes)


def test_one_implementation_at_a_time() -> None:
    fields = FIELDS | {"wrapped_model": Tiny(), "weight_decay": 0.1, "weight_decay_groups_excluded": []}
    both = fields | {"foreach": True, "fused": True}
    assert "choose one" in str(broken_rule(AdamWConfig, AdamWConfig(**both), both))
    assert broken_rule(AdamWConfig, AdamWConfig(**fields), fields) is None
