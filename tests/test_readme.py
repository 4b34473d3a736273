"""What the README shows exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from modalities.cli.main import cli

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"modalities (?:data |config )?[a-z][\w]*(?: [^|`\n]*)?(?=[|`\n])", README)))


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) > 8


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_and_their_options_exist(command: str) -> None:
    words = command.split("#")[0].split()[1:]
    name = words[:2] if words[0] in ("data", "config") else words[:1]
    shown = CliRunner().invoke(cli, [*name, "--help"])
    assert shown.exit_code == 0, command
    for option in re.findall(r"(?<=\s)--[\w-]+", command):
        assert option in shown.output, f"{option} of `{command}`"


def test_files_that_it_points_to_are_there() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (REPOSITORY / target).exists(), target


def test_the_quickstart_is_as_short_as_it_says() -> None:
    quickstart = (REPOSITORY / "config_files" / "training" / "quickstart.yaml").read_text(encoding="utf-8")
    assert f"[{len(quickstart.splitlines())} lines]" in README
