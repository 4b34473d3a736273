from __future__ import annotations

import io
import logging
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from modalities.exceptions import UserError
from modalities.optim.components import sign
from modalities.registry.fields import load_object

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")

ONE_CYCLE = {"max_lr": 1.0, "pct_start": 0.25, "div_factor": 10, "final_div_factor": 10, "total_steps": 20}
WARMUP = {"warmup_steps": 4, "total_steps": 12, "initial_lr": 0.1, "max_lr": 0.5, "final_lr": 0.01}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dummy": ("dummy_lr", {}),
    "step": ("step_lr", {"step_size": 3, "gamma": 0.5}),
    "constant": ("constant_lr", {"factor": 0.25, "total_iters": 4}),
    "linear": ("linear_lr", {"start_factor": 0.1, "end_factor": 0.9, "total_iters": 15}),
    "one cycle": ("onecycle_lr", {**ONE_CYCLE, "anneal_strategy": "cos"}),
    "one cycle, linear, three phases, momentum": (
        "onecycle_lr",
        {**ONE_CYCLE, "anneal_strategy": "linear", "three_phase": True, "cycle_momentum": True},
    ),
    "cosine": ("cosine_annealing_lr", {"t_max": 8, "eta_min": 0.01}),
    "warm-up and cosine": ("linear_warmup_cosine_annealing_lr", WARMUP),
}


def make_optimizer() -> AdamW:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    return AdamW([{"params": [first], "weight_decay": 0.1}, {"params": [second], "weight_decay": 0.0}], lr=0.2)


def make_scheduler(variant: str, optimizer: AdamW, **fields: Any) -> LRScheduler:
    spec = next(spec for spec in sign.specs if (spec.kind, spec.variant) == ("scheduler", variant))
    config = spec.config(optimizer=optimizer, **fields)
    return load_object(spec.builds)(**{name: getattr(config, name) for name in spec.config.model_fields})


def train(optimizer: AdamW, scheduler: LRScheduler, num_steps: int) -> list[Any]:
    trace = []
    for _ in range(num_steps):
        trace.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        scheduler.step()
    return trace


def rates(variant: str, num_steps: int, **fields: Any) -> list[float]:
    optimizer = make_optimizer()
    return [step[0][0] for step in train(optimizer, make_scheduler(variant, optimizer, **fields), num_steps)]


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


@pytest.mark.parametrize("case", CASES)
def test_resuming_from_a_state_is_exact(case, caplog) -> None:
    variant, fields = CASES[case]
    optimizer = make_optimizer()
    scheduler = make_scheduler(variant, optimizer, **fields)
    train(optimizer, scheduler, 10)
    saved = through_a_file({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()})
    expected = train(optimizer, scheduler, 10)

    resumed_optimizer = make_optimizer()
    resumed = make_scheduler(variant, resumed_optimizer, **fields)
    resumed_optimizer.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["scheduler"])
    assert resumed.get_last_lr() == saved["scheduler"]["_last_lr"]
    assert train(resumed_optimizer, resumed, 10) == expected
    assert resumed.state_dict() == scheduler.state_dict()
    assert not caplog.records


@pytest.mark.parametrize("case", CASES)
def test_resuming_from_the_optimizer_and_the_last_step_is_exact(case) -> None:
    variant, fields = CASES[case]
    if variant == "dummy_lr":
        pytest.skip("has no last_epoch")
    optimizer = make_optimizer()
    scheduler = make_scheduler(variant, optimizer, **fields)
    train(optimizer, scheduler, 10)
    saved = through_a_file(optimizer.state_dict())
    expected = train(optimizer, scheduler, 10)

    resumed_optimizer = make_optimizer()
    resumed_optimizer.load_state_dict(saved)
    resumed = make_scheduler(variant, resumed_optimizer, **fields, last_epoch=9)
    assert train(resumed_optimizer, resumed, 10) == expected


@pytest.mark.parametrize(
    ("case", "reference"),
    [
        ("step", lambda optimizer, fields: lr_scheduler.StepLR(optimizer, **fields)),
        ("constant", lambda optimizer, fields: lr_scheduler.ConstantLR(optimizer, **fields)),
        ("linear", lambda optimizer, fields: lr_scheduler.LinearLR(optimizer, **fields)),
        ("cosine", lambda optimizer, fields: lr_scheduler.CosineAnnealingLR(optimizer, 8, 0.01)),
    ],
)
def test_rates_and_state_keys_are_those_of_torch(case, reference) -> None:
    variant, fields = CASES[case]
    optimizer = make_optimizer()
    scheduler = reference(optimizer, fields)
    expected = [step[0][0] for step in train(optimizer, scheduler, 20)]
    assert rates(variant, 20, **fields) == pytest.approx(expected, rel=1e-9)
    assert set(make_scheduler(variant, make_optimizer(), **fields).state_dict()) == set(scheduler.state_dict())


def test_one_cycle_is_torchs() -> None:
    optimizer = make_optimizer()
    reference = lr_scheduler.OneCycleLR(optimizer, **ONE_CYCLE, cycle_momentum=False)
    expected = [step[0][0] for step in train(optimizer, reference, 20)]
    variant, fields = CASES["one cycle"]
    assert rates(variant, 20, **fields) == expected
    assert set(make_scheduler(variant, make_optimizer(), **fields).state_dict()) == set(reference.state_dict())


def test_warmup_and_cosine() -> None:
    found = rates("linear_warmup_cosine_annealing_lr", 15, **WARMUP)
    assert found[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert found[8] == pytest.approx((0.5 + 0.01) / 2)
    assert found[6] == pytest.approx(0.01 + 0.49 * (1 + math.cos(math.pi / 4)) / 2)
    assert found[12:] == [0.01, 0.01, 0.01]


def test_no_warmup_and_no_decay() -> None:
    assert rates("linear_warmup_cosine_annealing_lr", 2, **WARMUP | {"warmup_steps": 0})[0] == 0.5
    only_warmup = rates("linear_warmup_cosine_annealing_lr", 14, **WARMUP | {"warmup_steps": 12})
    assert only_warmup[6] == pytest.approx(0.3)
    assert only_warmup[12:] == [0.01, 0.01]


def test_a_rise_of_one_step() -> None:
    found = rates("onecycle_lr", 20, **ONE_CYCLE | {"pct_start": 0.05, "anneal_strategy": "cos"})
    assert found[0] == pytest.approx(0.1)
    assert max(found) <= 1.0


def test_one_cycle_beyond_its_end() -> None:
    optimizer = make_optimizer()
    scheduler = make_scheduler("onecycle_lr", optimizer, **ONE_CYCLE, anneal_strategy="cos")
    train(optimizer, scheduler, 20)
    with pytest.raises(UserError, match="step 21 lies beyond total_steps 20"):
        scheduler.step()


def test_one_cycle_by_epochs() -> None:
    fields = {**ONE_CYCLE, "anneal_strategy": "cos"} | {"total_steps": None, "epochs": 4, "steps_per_epoch": 5}
    assert rates("onecycle_lr", 20, **fields) == rates("onecycle_lr", 20, **ONE_CYCLE, anneal_strategy="cos")


def test_one_cycle_with_too_few_rates() -> None:
    with pytest.raises(UserError, match="max_lr has 1 values, but the optimizer has 2 parameter groups"):
        rates("onecycle_lr", 1, **ONE_CYCLE | {"max_lr": [1.0]}, anneal_strategy="cos")


def test_starting_in_the_middle_needs_a_loaded_optimizer() -> None:
    for case in ("step", "one cycle"):
        variant, fields = CASES[case]
        with pytest.raises(UserError, match="last_epoch is 9, but the optimizer's groups hold no initial_lr"):
            rates(variant, 1, **fields, last_epoch=9)


def test_a_changed_config_wins_over_the_state_and_says_so(caplog) -> None:
    for variant, fields in ((CASES["one cycle"]), (CASES["warm-up and cosine"])):
        caplog.clear()
        optimizer = make_optimizer()
        scheduler = make_scheduler(variant, optimizer, **fields)
        train(optimizer, scheduler, 10)
        changed = fields | {"total_steps": 40, "max_lr": 0.75}
        expected = rates(variant, 14, **changed)[10:]
        resumed_optimizer = make_optimizer()
        resumed = make_scheduler(variant, resumed_optimizer, **changed)
        resumed_optimizer.load_state_dict(optimizer.state_dict())
        with caplog.at_level(logging.WARNING):
            resumed.load_state_dict(scheduler.state_dict())
        assert f"total_steps {fields['total_steps']}; the config's 40 is used" in caplog.text
        assert [step[0][0] for step in train(resumed_optimizer, resumed, 4)] == expected


def test_groups_hold_plain_numbers() -> None:
    for variant, fields in CASES.values():
        optimizer = make_optimizer()
        make_scheduler(variant, optimizer, **fields)
        for group in optimizer.param_groups:
            assert {type(group[key]) for key in ("lr", "initial_lr", "max_lr", "min_lr") if key in group} == {float}


def test_loading_warns_of_nothing() -> None:
    variant, fields = CASES["one cycle"]
    scheduler = make_scheduler(variant, make_optimizer(), **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_scheduler(variant, make_optimizer(), **fields).load_state_dict(scheduler.state_dict())
