"""Files and folders appear whole or not at all."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from modalities.checkpointing.commit import commit_folder, discard, write_json
from modalities.durability import atomic_file, temporary_path


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    final = tmp_path / "state.bin"
    with atomic_file(final) as file:
        file.write(b"new")
        assert not final.exists()
    assert final.read_bytes() == b"new"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    final = tmp_path / "info.json"
    write_json(final, {"step": 1})

    def write_half() -> None:
        with atomic_file(final) as file:
            file.write(b"{")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        write_half()
    assert json.loads(final.read_text()) == {"step": 1}
    assert list(tmp_path.iterdir()) == [final]


def test_a_folder_replaces_an_older_one_of_its_name(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint"
    final.mkdir()
    (final / "old").touch()
    temporary = temporary_path(final)
    temporary.mkdir()
    (temporary / "new").touch()
    commit_folder(temporary, final)
    assert [path.name for path in final.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [final]


def test_discarding_removes_a_folder_with_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "data").touch()
    discard(folder)
    assert list(tmp_path.iterdir()) == []


def test_discarding_what_is_gone_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        discard(tmp_path / "gone")
    assert "gone already" in caplog.text
