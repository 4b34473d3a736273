"""YAML to a tree in which each value knows its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from modalities.config.faults import Fault
from modalities.config.tree import Node
from modalities.config.yaml_loader import load_yaml
from modalities.exceptions import ConfigError


def _load(tmp_path: Path, text: str) -> tuple[Node, list[Fault]]:
    file = tmp_path / "exp.yaml"
    file.write_text(text, encoding="utf-8")
    faults: list[Fault] = []
    return load_yaml(file, faults), faults


def test_values_and_keys_know_their_line_and_column(tmp_path: Path) -> None:
    tree, faults = _load(tmp_path, "a:\n  b: [1, {c: x}]\n")
    assert faults == []
    inner = tree.get(("a", "b", 1, "c"))
    assert inner is not None
    assert (inner.place.line, inner.place.column) == (2, 14)
    assert inner.key_place is not None
    assert (inner.key_place.line, inner.key_place.column) == (2, 11)
    assert str(inner.place) == f"{tmp_path / 'exp.yaml'}:2:14"
    assert tree.plain() == {"a": {"b": [1, {"c": "x"}]}}


SPELLINGS = [
    *("1", "-1", "0", "1.0", ".5", "5.", "1e-5", "6e-4", "1E3", "1e+3", "-2.5e-3", "1_000", "1_000.5", ".inf", "-.inf"),
    *(
        "+1",
        "0x1F",
        "010",
        "12:30",
        "12:30:45.5",
        "true",
        "True",
        "yes",
        "off",
        "No",
        "null",
        "~",
        "text",
        "1e",
        "1.2.3",
    ),
    *("2020-01-01", "'x'", '"1e-5"'),
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_scalars_are_read_as_omegaconf_reads_them(tmp_path: Path, spelling: str) -> None:
    text = f"x: {spelling}\n"
    tree, _ = _load(tmp_path, text)
    expected = OmegaConf.create(text)["x"]
    assert tree.plain()["x"] == expected
    assert type(tree.plain()["x"]) is type(expected)


def test_a_quoted_number_stays_text(tmp_path: Path) -> None:
    tree, _ = _load(tmp_path, "x: '10e2'\n")
    assert tree.plain() == {"x": "10e2"}


def test_duplicate_keys_are_all_told_with_both_places(tmp_path: Path) -> None:
    _, faults = _load(tmp_path, "a: 1\nb: {c: 1, c: 2}\na: 3\n")
    assert [(f.code, f.place.line, f.related[0][1].line) for f in faults] == [
        ("duplicate-key", 2, 2),
        ("duplicate-key", 3, 1),
    ]


def test_anchors_and_merge_keys_work_and_a_loop_is_told(tmp_path: Path) -> None:
    tree, faults = _load(tmp_path, "base: &b {x: 1, y: 2}\nmore: {<<: *b, y: 3}\n")
    assert (tree.plain()["more"], faults) == ({"x": 1, "y": 3}, [])
    _, faults = _load(tmp_path, "a: &a [*a]\n")
    assert [f.code for f in faults] == ["yaml-alias"]


def test_octal_numbers_warn(tmp_path: Path) -> None:
    _, faults = _load(tmp_path, "x: 0256\n")
    assert [(f.severity, f.code) for f in faults] == [("warning", "yaml11-int")]


@pytest.mark.parametrize(
    ("text", "line"), [("a: [1\nb: 2\n", 2), ("a: 1\n  b: 2\n", 2), ("a: 'x\n", 2), ("- 1\n", 1), ("", 1)]
)
def test_what_is_no_config_is_a_fault_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    _, faults = _load(tmp_path, text)
    assert [fault.place.line for fault in faults] == [line]
    assert f"exp.yaml:{line}" in faults[0].render()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("? [a, b]\n: 3\n", "yaml-key"),
        ("? {a: b}\n", "yaml-key"),
        ("<<: 5\n", "yaml-merge"),
        ("<<: [[1]]\n", "yaml-merge"),
    ],
)
def test_odd_keys_and_merges_are_faults(tmp_path: Path, text: str, code: str) -> None:
    _, faults = _load(tmp_path, text)
    assert [(fault.code, fault.place.line) for fault in faults] == [(code, 1)]


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    tree, _ = _load(tmp_path, "\ufeffa: 1\n")
    assert tree.plain() == {"a": 1}


def test_an_absent_file_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").touch()
    with pytest.raises(ConfigError, match=r"did you mean `experiment\.yaml`"):
        load_yaml(tmp_path / "experimnt.yaml", [])


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "latin.yaml"
    file.write_bytes("a: é".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8 text: byte 3 is 0xe9"):
        load_yaml(file, [])
