"""The JSON schema takes what `check` takes, and refuses what an editor should underline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from modalities.composition.schema import Schema
from modalities.config.yaml_loader import load_yaml
from modalities.inspection.json_schema import json_schema
from modalities.registry.registry import Registry
from modalities.testing.tiny import tiny_config
from modalities.training.recipe import TrainingRecipe
from tests.faults.cases import BASE

REPOSITORY = Path(__file__).parents[2]
SHIPPED = REPOSITORY / "config_files" / "modalities.schema.json"
SCHEMA = json_schema(Schema(Registry.standard(), TrainingRecipe))
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


def _faults(tree: Any) -> list[str]:
    return ["/".join(map(str, error.absolute_path)) for error in VALIDATOR.iter_errors(tree)]


def test_the_shipped_schema_is_up_to_date() -> None:
    """`modalities config schema > config_files/modalities.schema.json` makes it anew."""
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert json.loads(SHIPPED.read_text()) == SCHEMA


@pytest.mark.parametrize(
    "file", sorted(REPOSITORY.glob("config_files/*/*.yaml")), ids=lambda file: f"{file.parent.name}/{file.stem}"
)
def test_shipped_files_fit(file: Path) -> None:
    text = file.read_text()
    is_whole = "# @package _global_" in text or file.parent.name == "training"
    assert ("# yaml-language-server: $schema=../modalities.schema.json\n" in text) == is_whole
    if is_whole:
        assert _faults(load_yaml(file, []).plain()) == []


def test_short_and_canonical_files_fit(tmp_path: Path) -> None:
    (tmp_path / "short.yaml").write_text(BASE)
    assert _faults(load_yaml(tmp_path / "short.yaml", []).plain()) == []
    for wrapper in ("fsdp1", "fsdp2"):
        assert _faults(tiny_config(tmp_path, wrapper=wrapper)) == []


@pytest.mark.parametrize(
    "tree",
    [
        {"checkpoint_saving": "dpc"},
        {"optimizer": {"variant_key": "adam_w", "lrr": 1}},
        {"optimizer": {"component_key": "optimizer", "variant_key": "adam_w", "config": {"lrr": 1}}},
        {"optimizer": {"variant_key": "adam_w", "lr": "fast"}},
        {"settings": {"intervals": {"training_log_interval_in_steps": "often"}}},
        {"settings": {"autocast": "fp8"}},
        {"eval_dataloaders": ["deflaut"]},
    ],
)
def test_what_check_refuses_is_underlined(tree: Any) -> None:
    assert _faults(tree)


def test_meanings_are_shown() -> None:
    lr = SCHEMA["$defs"]["optimizer.adam_w.lr"]
    assert lr["description"].startswith("learning rate")
    assert SCHEMA["properties"]["loss_fn"]["description"] == "what is minimised"
