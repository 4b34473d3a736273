"""Every example of the configuration guide does what the guide says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from modalities.cli.main import main

REPOSITORY = Path(__file__).parents[1]
GUIDE = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```yaml (\S+)\n(.*?)```", GUIDE, re.DOTALL))
EXAMPLES = [
    (command.strip(), expected.rstrip("\n"))
    for block in re.findall(r"```console\n(.*?)```", GUIDE, re.DOTALL)
    for command, expected in re.findall(r"\$ (.*?)\n(.*?)(?=\n\$ |\Z)", block + "\n", re.DOTALL)
]
ELLIPSIS = "…"


def test_the_guide_has_examples() -> None:
    assert len(FILES) == 3
    assert len(EXAMPLES) > 7


@pytest.mark.parametrize(("command", "expected"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_example(
    command: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "tutorials").symlink_to(REPOSITORY / "tutorials")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(command)[1:])
    output, errors = capsys.readouterr()
    assert ended.value.code == (2 if "error[" in expected else 0)
    lines = [re.escape(line) if line != ELLIPSIS else "(?:.*\n)*?.*" for line in expected.strip().split("\n")]
    assert re.fullmatch("\n".join(lines), (output + errors).strip()), output + errors
