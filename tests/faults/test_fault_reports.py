"""The text that a user reads for each kind of mistake: code, message, place, excerpt, what to do.

``python -m tests.faults.test_fault_reports`` from the repository's root writes ``expected.txt`` anew, to be read in the
diff before it is committed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from modalities.config.faults import unique
from modalities.exceptions import ConfigError
from modalities.run import RunRequest, check
from modalities.testing.tiny import write_tokens
from tests.faults.cases import BASE, CASES, Case

EXPECTED_FILE = Path(__file__).parent / "expected.txt"
_TITLE = "=== "


def _report(case: Case, folder: Path) -> str:
    """All faults of a case as the command prints them, the file being ``exp.yaml`` of the present folder."""
    (folder / "exp.yaml").write_text(case.text, encoding="utf-8")
    if not (folder / "train.pbin").is_file():
        write_tokens(folder / "train.pbin", 1000, 128)
    try:
        faults = check(RunRequest(Path("exp.yaml"), overrides=case.words)).faults
    except ConfigError as error:
        return str(error)
    return "\n\n".join(fault.render() for fault in unique(faults))


def _normal(text: str) -> str:
    """Without what differs between machines."""
    return re.sub(r"(?<=[ ,`])\S*/(?=config_files)", "", text)


def _expected() -> dict[str, str]:
    parts = re.split(rf"^{_TITLE}(.*)\n", EXPECTED_FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {name: text.strip("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}


EXPECTED = _expected() if EXPECTED_FILE.is_file() else {}


def test_the_config_is_fine_without_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert BASE
    assert _report(Case("none"), tmp_path) == ""


def test_there_are_enough_kinds() -> None:
    assert len(CASES) == len({case.name for case in CASES}) == len(EXPECTED)
    assert len(CASES) >= 60


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_report(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = _normal(_report(case, tmp_path))
    assert report == EXPECTED[case.name]
    # one mistake, one short report
    assert report.count("error[") <= 2
    assert len(report) < 1500


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_place_is_named(case: Case) -> None:
    expected = EXPECTED[case.name]
    assert re.search(r"--> (exp\.yaml:\d+:\d+|override `)", expected)
    is_absence = case.name.startswith("missing")
    if case.old and not is_absence:
        line = case.text[: case.text.index(case.new) if case.new else 0].count("\n") + 1
        span = range(line, line + case.new.count("\n") + 1)
        # an open bracket is noticed below it
        is_open = case.name == "unclosed bracket"
        assert any(f"exp.yaml:{number + is_open}:" in expected for number in span)


def test_all_mistakes_at_once_hide_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Independent mistakes of one file are all told, each once."""
    monkeypatch.chdir(tmp_path)
    chosen = [
        "field misspelt",
        "field of a nested component misspelt",
        "enum misspelt",
        "variant misspelt in the short form",
        "quoted number",
        "block name misspelt",
        "heads do not divide the width",
        "reference to nothing",
        "zero steps",
        "entry given twice",
    ]
    by_name = {case.name: case for case in CASES}
    text = BASE
    for name in chosen:
        assert by_name[name].old in text, name
        text = text.replace(by_name[name].old, by_name[name].new, 1)
    (tmp_path / "exp.yaml").write_text(text)
    write_tokens(tmp_path / "train.pbin", 1000, 128)
    errors = check(RunRequest(Path("exp.yaml"), overrides=("optimizer.lrr=1",))).errors
    assert len(errors) == len({(fault.path, fault.code) for fault in errors})
    told = "\n".join(fault.render() for fault in errors)
    for name in [*chosen, "override of an unknown field"]:
        first = next(line for line in EXPECTED[name].splitlines() if line.startswith("error"))
        assert first in told, name


def test_the_command_fails_with_two_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text(CASES[0].text)
    words = [sys.executable, "-m", "modalities", "check", "--config", "exp.yaml"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"})
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "did you mean `gradient_clipper`?" in done.stderr


def _write_expected() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        parts = [f"{_TITLE}{case.name}\n{_normal(_report(case, Path(name)))}\n" for case in CASES]
    EXPECTED_FILE.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    _write_expected()
