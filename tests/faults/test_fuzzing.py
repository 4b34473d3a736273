"""Whatever is in a config, the program answers: it tells faults, or it understands."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modalities.config.faults import unique
from modalities.config.yaml_writer import scalar_text
from modalities.exceptions import ConfigError, UserError
from modalities.factory.plan import Plan
from modalities.inspection.differences import differences
from modalities.inspection.showing import show, show_short
from modalities.inspection.upgrading import upgrade
from modalities.run import RunRequest, compose, plan_of
from modalities.testing.tiny import tiny_config, write_config, write_tokens
from tests.faults.cases import BASE

FILE = Path("exp.yaml")

REFERENCES = ["${ref:model}", "${ref:}", "${ref:settings}", "${optimizer.lr}", "${a.b}", "${.x}", "${..y}", "${"]
TEXTS = [
    *REFERENCES,
    "${oc.env:HOME}",
    "${oc.select:settings.paths}",
    "dcp",
    "raw",
    "gpt2",
    "???",
    "08",
    "1e-5",
    "yes",
    "[",
    "*x",
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(allow_nan=True),
    st.sampled_from([*TEXTS, "", "a: b", "# x"]),
    st.text(max_size=8),
)
MAPPINGS = st.dictionaries(st.text(min_size=1, max_size=6), SCALARS, max_size=2)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), MAPPINGS)
WORDS = st.one_of(VALUES.map(scalar_text), st.text(max_size=8), st.sampled_from(["a,b", "range(3)", "[1,2", "{a:1}"]))
KEYS = re.findall(r"[\w]+(?=:)", BASE)


@pytest.fixture(autouse=True, scope="module")
def _folder() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        write_tokens(Path("train.pbin"), 1000, 128)
        yield
        os.chdir(before)


def _answer(text: str, words: tuple[str, ...] = ()) -> Plan | None:
    """The plan, or None where the file is no config at all; anything but our own errors is a failure."""
    FILE.write_text(text, encoding="utf-8", errors="surrogatepass")
    request = RunRequest(FILE, overrides=words)
    try:
        composed = compose(request)
    except ConfigError as error:
        if not error.faults and "UTF-8" not in str(error):
            raise
        return None
    plan = plan_of(composed)
    for fault in unique(plan.faults):
        assert fault.message
        assert fault.place.file or fault.place.origin
        fault.render()
        fault.as_json()
    if not plan.errors:
        shown = show(composed)
        Path("shown.yaml").write_text(shown, encoding="utf-8")
        again = compose(RunRequest(Path("shown.yaml")))
        assert show(again) == shown
        Path("short.yaml").write_text(show_short(composed), encoding="utf-8")
        short = compose(RunRequest(Path("short.yaml")))
        assert differences(composed, short) == []
    return plan


def _fuzzed(number: int):  # type: ignore[no-untyped-def]
    return settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck))


@_fuzzed(150)
@given(st.data())
def test_values_replaced(data: st.DataObject) -> None:
    lines = BASE.splitlines()
    index = data.draw(st.sampled_from([i for i, line in enumerate(lines) if ":" in line]))
    key, _, _ = lines[index].partition(":")
    lines[index] = f"{key}: {scalar_text(data.draw(VALUES))}"
    _answer("\n".join(lines))


@_fuzzed(150)
@given(st.data())
def test_lines_deleted_doubled_moved_and_indented(data: st.DataObject) -> None:
    lines = BASE.splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.integers(0, len(lines) - 1))
        match data.draw(st.sampled_from(["delete", "double", "move", "indent", "dedent", "tab"])):
            case "delete":
                del lines[index]
            case "double":
                lines.insert(index, lines[index])
            case "move":
                lines.insert(data.draw(st.integers(0, len(lines) - 1)), lines.pop(index))
            case "indent":
                lines[index] = "  " + lines[index]
            case "dedent":
                lines[index] = lines[index].removeprefix("  ")
            case "tab":
                lines[index] = "\t" + lines[index]
    _answer("\n".join(lines))


@_fuzzed(100)
@given(st.integers(0, len(BASE) - 1), st.text(max_size=4), st.integers(0, 4))
def test_characters_replaced(position: int, text: str, removed: int) -> None:
    _answer(BASE[:position] + text + BASE[position + removed :])


@_fuzzed(100)
@given(st.data())
def test_an_unknown_key_is_never_accepted_in_silence(data: st.DataObject) -> None:
    positions = [match.span() for match in re.finditer(r"[a-z]\w+(?=:)", BASE)]
    start, end = data.draw(st.sampled_from(positions))
    key = BASE[start:end]
    # free names: what a user calls paths, and what is under `user`
    if key == "data":
        return
    changed = data.draw(st.sampled_from([key + "z", "z" + key, key[:-1] + "q", key[::-1]]))
    if changed in KEYS:
        return
    plan = _answer(BASE[:start] + changed + BASE[end:])
    assert plan is None or plan.faults


@_fuzzed(150)
@given(st.data())
def test_overrides(data: st.DataObject) -> None:
    paths = [".".join(map(str, path)) for path, _ in compose_base().unresolved.leaves()]
    path = data.draw(st.sampled_from([*paths, *KEYS, "model.n_layer", "optimizer.betas.0", "nothing.at.all", ""]))
    prefix = data.draw(st.sampled_from(["", "+", "++", "~"]))
    value = data.draw(
        st.one_of(VALUES.map(scalar_text), st.text(max_size=8), st.sampled_from(["a,b", "range(3)", "[1,2", "{a:1}"]))
    )
    word = f"{prefix}{path}" if prefix == "~" and data.draw(st.booleans()) else f"{prefix}{path}={value}"
    _answer(BASE, (word,))


def compose_base() -> Any:
    FILE.write_text(BASE, encoding="utf-8")
    return compose(RunRequest(FILE))


@_fuzzed(60)
@given(st.data())
def test_an_upgraded_file_means_the_same(data: st.DataObject) -> None:
    """Canonical files with comments strewn in, some of them in flow style."""
    tree = tiny_config(Path())
    write_config(tree, FILE)
    lines = FILE.read_text().splitlines()
    marks = []
    for number in range(data.draw(st.integers(0, 4))):
        index = data.draw(st.integers(0, len(lines) - 1))
        mark = f"# remark {number}"
        marks.append(mark)
        if data.draw(st.booleans()):
            lines[index] += f"  {mark}"
        else:
            margin = len(lines[index]) - len(lines[index].lstrip())
            lines.insert(index, " " * margin + mark)
    FILE.write_text("\n".join(lines) + "\n")
    before = compose(RunRequest(FILE))
    try:
        text = upgrade(before, FILE)
    except UserError as refused:
        if "meaning" not in str(refused) and "line" not in str(refused):
            raise
        return
    FILE.write_text(text)
    assert differences(before, compose(RunRequest(FILE))) == []
    assert all(mark in text for mark in marks)
    assert len(text.splitlines()) < len(lines)
