"""A small experiment in short forms, to be changed by overrides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from modalities.composition.compose import ComposedConfig
from modalities.run import RunRequest, compose
from modalities.testing.tiny import write_tokens
from tests.faults.cases import BASE

Composer = Callable[..., ComposedConfig]


@pytest.fixture
def composer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Composer:
    """Composes the base config, or a text, with override words; the present folder holds its data."""
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "train.pbin", 1000, 128)

    def composed(*words: str, text: str = BASE) -> ComposedConfig:
        (tmp_path / "exp.yaml").write_text(text, encoding="utf-8")
        return compose(RunRequest(Path("exp.yaml"), experiment_id="run-1", overrides=words))

    return composed
