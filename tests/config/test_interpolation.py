"""Interpolations have OmegaConf's answers, and places of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict

from modalities.composition.compose import ComposedConfig, ConfigRequest, compose_config
from modalities.config.dumping import dump_resolved
from modalities.config.environment import Environment, launcher_value
from modalities.exceptions import ConfigError
from modalities.registry.registry import Registry


class _Anything(BaseModel):
    model_config = ConfigDict(extra="allow")


def _load(tmp_path: Path, text: str, **environment: Any) -> ComposedConfig:
    file = tmp_path / "exp.yaml"
    file.write_text(text, encoding="utf-8")
    request = ConfigRequest(Environment(file, tmp_path, "run-1", **environment))
    return compose_config(request, _Anything, Registry())


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nb: ${a}\n",
        "a: {b: {c: [10, 20]}}\nd: ${a.b.c[1]}\ne: ${a.b}\n",
        "a: x\nb: pre-${a}-post\nc: ${b}\n",
        "a: {b: 1, c: '${.b}', d: {e: '${..b}'}}\n",
        "a: b\nb: 3\nc: ${${a}}\n",
        "a: [1, '${b}']\nb: {c: '${d}'}\nd: deep\n",
        "a: ${oc.env:MODALITIES_TEST_VARIABLE,fallback}\n",
        "a: ${oc.select:nothing,5}\n",
        "a: {x: 1}\nb: ${oc.dict.keys:a}\n",
        "a: \\${not}\n",
    ],
)
def test_values_are_omegaconf_s(tmp_path: Path, text: str) -> None:
    loaded = _load(tmp_path, text)
    assert loaded.faults == []
    assert loaded.tree.plain() == OmegaConf.to_container(OmegaConf.create(text), resolve=True)


def test_a_copied_value_tells_where_it_came_from(tmp_path: Path) -> None:
    tree = _load(tmp_path, "a: 1\nb: ${a}\nc: ${b}\n").tree
    node = tree.get(("c",))
    assert node is not None
    assert (node.value, node.place.line) == (1, 3)
    assert [(expression, place.line) for expression, place in node.via] == [("${b}", 2), ("${a}", 1)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: {target_key: 1}\nb: ${a.targt_key}\n", ["no `targt_key` in `a`", "`target_key`", "exp.yaml:2"]),
        ("a: ${b}\nb: ${a}\n", ["goes round", "a -> b"]),
        ("a: ${cuda_evn:RANK}\n", ["cuda_evn", "`cuda_env`"]),
        ("a: ${modalities_env:experiment}\n", ["experiment_id"]),
        ("a: ${warmstart_env:checkpoint_paths}\n", ["warmstart"]),
    ],
)
def test_what_has_no_answer_is_told_with_both_ends(tmp_path: Path, text: str, told: list[str]) -> None:
    report = "\n".join(fault.render() for fault in _load(tmp_path, text).faults)
    assert all(word in report for word in told), report


def test_the_environment_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    text = "r: ${cuda_env:RANK}\nw: ${cuda_env:WORLD_SIZE}\n"
    text += "i: ${modalities_env:experiment_id}\nf: ${modalities_env:config_file_path}\n"
    expected = {"i": "run-1", "f": str(tmp_path / "exp.yaml")}
    assert _load(tmp_path, text).tree.plain() == {"r": 0, "w": 1, **expected}
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert _load(tmp_path, text).tree.plain() == {"r": 3, "w": 8, **expected}


def test_a_launcher_s_nonsense_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'many', not a number"):
        launcher_value("WORLD_SIZE")


def test_a_warm_start_looks_through_its_pointer(tmp_path: Path) -> None:
    info = tmp_path / "info.json"
    info.write_text(json.dumps({"checkpoint_folder_path": "/c/eid_x"}))
    text = "w: ${warmstart_env:checkpoint_paths}\np: ${w.checkpoint_folder_path}\n"
    assert _load(tmp_path, text, last_checkpoint_info_file_path=info).tree.plain()["p"] == "/c/eid_x"


def test_a_resolved_config_is_plain_yaml_and_keeps_questions_of_ranks_and_runs(tmp_path: Path) -> None:
    text = "s: {n: 2, r: '${cuda_env:RANK}', i: '${modalities_env:experiment_id}'}\na: ${s.n}\nb: ${s.r}\nc: ${s.i}\n"
    resolved = dump_resolved(_load(tmp_path, text).tree)
    assert yaml.safe_load(resolved) == {
        "s": {"n": 2, "r": "${cuda_env:RANK}", "i": "${modalities_env:experiment_id}"},
        "a": 2,
        "b": "${cuda_env:RANK}",
        "c": "${modalities_env:experiment_id}",
    }
    assert dump_resolved(_load(tmp_path, resolved).tree) == resolved
