"""Components of the user's own: where they come from, and what is said if they don't."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from modalities.composition.compose import ComposedConfig
from modalities.exceptions import RegistrationError, UserError
from modalities.run import RunRequest, compose, plan_of
from modalities.testing.tiny import write_tokens
from tests.faults.cases import BASE

COMPONENT = """
from modalities.registry.registry import register
from modalities.registry.interfaces import Loss

@register("loss", "{name}", provides=Loss)
class Mine:
    \"\"\"A loss of one's own.\"\"\"
    def __init__(self, target_key: str, prediction_key: str, weight: float = 1.0): ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("modalities.registry.registry._registered", [])
    write_tokens(tmp_path / "train.pbin", 1000, 128)
    return tmp_path


def _composed(text: str, *words: str, imports: tuple[str, ...] = ()) -> ComposedConfig:
    Path("exp.yaml").write_text(text)
    return compose(RunRequest(Path("exp.yaml"), overrides=words, imports=imports))


def test_a_file_named_on_the_command_line(folder: Path) -> None:
    (folder / "my_losses_a.py").write_text(COMPONENT.format(name="from_file"))
    plan = plan_of(
        _composed(
            BASE, "loss_fn={variant_key:from_file,target_key:y,prediction_key:logits}", imports=("my_losses_a.py",)
        )
    )
    assert not plan.errors
    assert plan.components[("loss_fn",)].spec.where == "my_losses_a:Mine"


def test_a_module_named_in_the_yaml(folder: Path) -> None:
    (folder / "my_losses_b.py").write_text(COMPONENT.format(name="from_module"))
    text = "imports: [my_losses_b]\n" + BASE
    word = "loss_fn={variant_key:from_module,target_key:y,prediction_key:logits}"
    composed = _composed(text, "loss_fn.weight=2", word)
    assert composed.imports == ["my_losses_b"]
    assert not plan_of(composed).errors
    errors = plan_of(_composed(text, word.replace("target", "wieght:2,target"))).errors
    assert [fault.hints for fault in errors] == [["did you mean `weight`?"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("def broken(:\n", "invalid syntax"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("import no_such_thing\n", "No module named 'no_such_thing'"),
        ("raise RuntimeError('not today')\n", "RuntimeError: not today"),
    ],
)
def test_a_module_that_fails_is_told_with_its_line(folder: Path, content: str, message: str) -> None:
    (folder / "failing.py").write_text("\n\n" + content)
    with pytest.raises(UserError, match=message) as caught:
        _composed(BASE, imports=("failing.py",))
    assert "failing.py:3" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 15
    text = "imports: [failing]\n" + BASE
    (fault,) = [f for f in _composed(text).faults if f.code == "import"]
    assert message in fault.message
    assert str(fault.place) == "exp.yaml:1:11"


def test_a_name_that_is_taken_names_both_places(folder: Path) -> None:
    (folder / "taking.py").write_text(COMPONENT.format(name="clm_cross_entropy_loss"))
    with pytest.raises(RegistrationError, match=r"modalities.training.components:CLM\w+ and by taking:Mine"):
        _composed(BASE, imports=("taking.py",))


def test_a_file_does_not_hide_a_module(folder: Path) -> None:
    (folder / "json.py").write_text("")
    with pytest.raises(UserError, match="rename the file"):
        _composed(BASE, imports=("json.py",))
    with pytest.raises(UserError, match="no such file"):
        _composed(BASE, imports=("absent.py",))


def test_an_installed_package_brings_its_components(folder: Path) -> None:
    """By the entry point group `modalities.components`, without a word in the config."""
    (folder / "their_package.py").write_text(COMPONENT.format(name="from_package"))
    info = folder / "their_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[modalities.components]\nmine = their_package\n")
    words = [sys.executable, "-m", "modalities", "components", "loss", "from_package"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "A loss of one's own." in done.stdout
    assert "weight: float = 1.0" in done.stdout
    (folder / "their_package.py").write_text("import no_such_thing\n")
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2
    assert "mend or uninstall their-package" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_variant_lists_what_is_registered(folder: Path) -> None:
    (fault,) = plan_of(_composed(BASE, "loss_fn=from_nowhere")).errors
    assert "variants: clm_cross_entropy_loss" in fault.hints[0]


def test_a_config_cannot_run_code(folder: Path) -> None:
    text = BASE.replace("loss_fn: clm_cross_entropy_loss", "loss_fn: {_target_: os.system, command: touch pwned}")
    text += "x-y: !!python/object/apply:os.system [touch pwned]\nuser: !!python/name:os.system\n"
    codes = {fault.code for fault in plan_of(_composed(text)).errors}
    assert {"no-variant", "yaml-tag"} <= codes
    assert not (folder / "pwned").exists()
