"""From a canonical tree to objects: checks, order, sharing, faults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from modalities.composition.compose import ConfigRequest, compose_config
from modalities.config.environment import Environment
from modalities.exceptions import ConfigError, UserError
from modalities.factory.build import build
from modalities.factory.plan import Plan
from modalities.registry.fields import Instance
from modalities.registry.interfaces import Interface
from modalities.registry.registry import Registry
from modalities.run import plan_of


class Engine:
    """A part that others share."""

    built = 0

    def __init__(self, power: int, fuel: str = "wind") -> None:
        Engine.built += 1
        if power > 100:
            raise UserError(f"power {power} is too much")
        self.power, self.fuel = power, fuel


class EngineSlot(Interface):
    runtime = f"{__name__}:Engine"


class Ship:
    """Something with engines."""

    def __init__(self, engine: Instance[EngineSlot], others: list[Instance[EngineSlot]] = ()) -> None:  # type: ignore[assignment]
        self.engine, self.others = engine, list(others)


class ShipSlot(Interface):
    runtime = None


class Fleet(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    flagship: Instance[ShipSlot]
    escort: Instance[ShipSlot] | None = None
    size: int = 1


def _registry() -> Registry:
    registry = Registry()
    sys.modules.setdefault(__name__, sys.modules[Engine.__module__])
    registry.add("engine", "sail", Engine, provides=EngineSlot)
    registry.add("ship", "frigate", Ship, provides=ShipSlot)
    return registry


ENGINE = "{component_key: engine, variant_key: sail, config: {power: 7}}"
REF = "{instance_key: engine, pass_type: BY_REFERENCE}"
GOOD = f"""\
flagship: {{component_key: ship, variant_key: frigate, config: {{engine: {REF}, others: [{REF}]}}}}
escort: {{component_key: ship, variant_key: frigate, config: {{engine: {REF}}}}}
engine: {ENGINE}
"""


def _plan(tmp_path: Path, text: str) -> Plan:
    file = tmp_path / "exp.yaml"
    file.write_text(text, encoding="utf-8")
    return plan_of(compose_config(ConfigRequest(Environment(file, tmp_path, "x")), Fleet, _registry()))


def test_a_shared_instance_is_built_once(tmp_path: Path) -> None:
    before = Engine.built
    fleet: Any = build(_plan(tmp_path, GOOD), Fleet)
    assert Engine.built == before + 1
    assert fleet.flagship.engine is fleet.escort.engine is fleet.flagship.others[0]


def test_a_copied_component_is_a_second_one_and_warns(tmp_path: Path) -> None:
    text = GOOD.replace(f"config: {{engine: {REF}}}", 'config: {engine: "${engine}"}')
    plan = _plan(tmp_path, text)
    assert [(f.severity, f.code) for f in plan.faults] == [("warning", "copied-component")]
    fleet: Any = build(plan, Fleet)
    assert fleet.flagship.engine is not fleet.escort.engine


@pytest.mark.parametrize(
    ("old", "new", "code", "told"),
    [
        ("component_key: engine", "component_key: engin", "unknown-kind", "did you mean `engine`"),
        ("variant_key: sail", "variant_key: sial", "unknown-variant", "did you mean `sail`"),
        ("variant_key: sail", "variant_key: {a: b}", "unknown-variant", "variants of engine: sail"),
        ("component_key: engine", "component_key: [engine]", "unknown-kind", "engine"),
        ("power: 7", "powr: 7", "unknown-field", "did you mean `power`"),
        ("power: 7", "fuel: coal", "missing-field", "needs `power`"),
        ("power: 7", "power: seven", "bad-value", 'got the text "seven"'),
        (
            REF + "}}\nengine",
            "{instance_key: engin, pass_type: BY_REFERENCE}}}\nengine",
            "unknown-reference",
            "`engine`",
        ),
        (REF + "}}\nengine", "{instance_key: flagship, pass_type: BY_REFERENCE}}}\nengine", "interface", "EngineSlot"),
        (REF + "}}\nengine", "steam}}\nengine", "unknown-variant", "`steam`"),
        ("variant_key: sail, ", "", "no-key", "`variant_key`"),
        ("config: {power: 7}", "config: {power: 7}, power: 8", "mixed-form", "move `power`"),
        ("pass_type: BY_REFERENCE}}}\nengine", "pass_type: BY_MAGIC}}}\nengine", "pass-type", "BY_MAGIC"),
        ("power: 7", f"power: {ENGINE}", "bad-value", "got `engine.config.power` = engine/sail"),
        (f"[{REF}]", f"{{x: {REF}}}", "bad-value", "needs a list"),
        ("escort:", "escrot:", "unused-entry", "did you mean `escort`"),
    ],
)
def test_a_fault_has_its_code_place_and_hint(tmp_path: Path, old: str, new: str, code: str, told: str) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    line = next(n for n, (a, b) in enumerate(zip(GOOD.splitlines(), text.splitlines(), strict=True), 1) if a != b)
    (fault,) = _plan(tmp_path, text).errors
    assert fault.code == code
    assert f"exp.yaml:{line}:" in fault.render()
    assert told in fault.render()


def test_all_faults_come_in_one_report_and_nothing_is_built(tmp_path: Path) -> None:
    text = GOOD.replace("power: 7", "power: seven, color: red") + "size: big\nextra: 1\n"
    before = Engine.built
    with pytest.raises(ConfigError) as refusal:
        build(_plan(tmp_path, text), Fleet)
    assert Engine.built == before
    assert {fault.code for fault in refusal.value.faults} == {"bad-value", "unknown-field"}
    assert len(refusal.value.faults) == 3
    assert "The config has 3 faults" in str(refusal.value)


def test_an_unused_entry_is_a_warning_and_notes_of_one_s_own_are_none(tmp_path: Path) -> None:
    plan = _plan(tmp_path, GOOD + "spare: 1\nuser: {note: mine}\nx-note: too\n")
    assert [(f.code, f.path, f.severity) for f in plan.faults] == [("unused-entry", ("spare",), "warning")]


def test_a_cycle_is_printed(tmp_path: Path) -> None:
    def ship(needs: str) -> str:
        engine = f"{{instance_key: {needs}, pass_type: BY_REFERENCE}}"
        return f"{{component_key: ship, variant_key: frigate, config: {{engine: {engine}}}}}"

    plan = _plan(tmp_path, f"flagship: {ship('b')}\nb: {ship('c')}\nc: {ship('b')}\n")
    cycle = next(fault for fault in plan.errors if fault.code == "cycle")
    assert "b -> c -> b" in cycle.message
    assert [place.line for _, place in cycle.related] == [2, 3]


def test_a_component_s_own_refusal_names_its_entry(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"power 101 is too much\n.*`engine` \(engine/sail\) of .*exp.yaml:3"):
        build(_plan(tmp_path, GOOD.replace("power: 7", "power: 101")), Fleet)


def test_build_order_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from modalities.run import RunRequest, check; "
        "print([c.path for c in check(RunRequest(Path('config_files/training/quickstart.yaml'))).build_order()])"
    )
    orders = set()
    for seed in ("0", "1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", program]
        root = Path(__file__).parents[2]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=root)
        orders.add(done.stdout)
    assert len(orders) == 1
