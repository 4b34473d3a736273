"""Files and folders appear whole or not at all."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from modalities.checkpointing.storage import (
    SUPERSEDED_PREFIX,
    RenamedFolder,
    as_location,
    commit_names,
    discard,
    is_remote,
    sweep,
)
from modalities.durability import atomic_file, replace_file, temporary_path, write_file

NAME = "eid_x-seen_steps_1-seen_tokens_2-target_steps_3-target_tokens_4"


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    final = tmp_path / "state.bin"
    with atomic_file(final) as file:
        file.write(b"new")
        assert not final.exists()
    assert final.read_bytes() == b"new"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    final = tmp_path / "info.json"
    replace_file(final, b"{}")

    def write_half() -> None:
        with atomic_file(final) as file:
            file.write(b"{")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        write_half()
    assert final.read_bytes() == b"{}"
    assert list(tmp_path.iterdir()) == [final]


def test_a_replaced_file_is_whole_though_a_kill_left_half_of_one(tmp_path: Path) -> None:
    final = tmp_path / "info.json"
    temporary_path(final).write_bytes(b"ha")
    replace_file(final, b"new")
    assert final.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [final]


def test_a_folder_replaces_an_older_one_of_its_name(tmp_path: Path) -> None:
    final = tmp_path / NAME
    final.mkdir()
    (final / "old").touch()
    destination = RenamedFolder(final, "s1")
    destination.begin()
    write_file(destination.working / "new", b"")
    destination.commit(b"{}")
    assert {path.name for path in final.iterdir()} == {"new", "manifest.json"}
    assert list(tmp_path.iterdir()) == [final]


@pytest.mark.parametrize("num_renamed", [0, 1])
def test_what_was_to_be_replaced_is_back_if_the_replacement_never_came(tmp_path: Path, num_renamed: int) -> None:
    entities = ["optimizer", "model"]
    finals = [tmp_path / f"eid_x-{e}-seen_steps_1-seen_tokens_2-target_steps_3-target_tokens_4.bin" for e in entities]
    for final in finals:
        final.with_name(SUPERSEDED_PREFIX + final.name).write_bytes(b"old")
    for final in finals[:num_renamed]:
        final.write_bytes(b"new")
    for final in finals[num_renamed:]:
        temporary_path(final).write_bytes(b"new")
    sweep(tmp_path, "x")
    assert [final.read_bytes() for final in finals] == [b"old", b"old"]
    assert sorted(tmp_path.iterdir()) == sorted(finals)


def test_what_was_replaced_goes_if_the_run_was_killed_behind_the_commit(tmp_path: Path) -> None:
    final = tmp_path / NAME
    for folder in (final, tmp_path / f"{SUPERSEDED_PREFIX}{NAME}"):
        folder.mkdir()
    sweep(tmp_path, "x")
    assert list(tmp_path.iterdir()) == [final]


def test_only_leftovers_of_the_run_itself_are_swept(tmp_path: Path) -> None:
    names = [
        ".tmp-eid_{}-seen_steps_1-seen_tokens_2-target_steps_3-target_tokens_4-0123abcd-7",
        ".tmp-eid_{}-model-seen_steps_1-seen_tokens_2-target_steps_3-target_tokens_4.bin",
        ".tmp-eid_{}-manifest-seen_steps_1-seen_tokens_2-target_steps_3-target_tokens_4.json",
        ".trash-eid_{}-seen_steps_1-seen_tokens_2-target_steps_3-target_tokens_4",
        ".tmp-eid_{}-probe1",
        ".tmp-last_checkpoint_info.json-eid_{}",
    ]
    for experiment_id in ("x", "x-y", "y"):
        for name in names:
            (tmp_path / name.format(experiment_id)).mkdir()
    (tmp_path / ".tmp-my own").mkdir()
    assert len(sweep(tmp_path, "x")) == len(names)
    others = {name.format(experiment_id) for experiment_id in ("x-y", "y") for name in names}
    assert {path.name for path in tmp_path.iterdir()} == {".tmp-my own", *others}


def test_names_are_given_in_order_the_deciding_one_last(tmp_path: Path) -> None:
    names = [(tmp_path / f".tmp-{name}", tmp_path / name) for name in ("optimizer", "model")]
    for temporary, _ in names:
        temporary.write_bytes(b"new")
    commit_names(names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "optimizer"]


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


@pytest.mark.parametrize(
    ("given", "remote"),
    [
        ("s3://bucket/runs", True),
        (Path("s3://bucket/runs"), True),
        ("memory://x", True),
        ("/tmp/runs", False),
        ("C:drive", False),
    ],
)
def test_urls_are_told_from_paths(given: str | Path, remote: bool) -> None:
    location = as_location(given)
    assert is_remote(location) is remote
    if remote:
        assert str(location) == str(given).replace(":/", "://").replace("///", "//")
