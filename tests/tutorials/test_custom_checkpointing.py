"""The tutorial does what it says, on two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from modalities.checkpointing.discovery import checkpoints_in
from modalities.testing.tiny import tiny_config, write_config

REPOSITORY = Path(__file__).parents[2]
TUTORIAL = REPOSITORY / "tutorials" / "custom_checkpointing" / "archived_saving.py"


def _call(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modalities", *map(str, words)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_a_checkpoint_saving_of_one_s_own(tmp_path: Path) -> None:
    assert len(TUTORIAL.read_text().splitlines()) < 60
    config = write_config(tiny_config(tmp_path, num_steps=4, checkpointing_interval=1), tmp_path / "exp.yaml")
    archive = tmp_path / "archive"
    words = ["--config", config, "--import", TUTORIAL, "checkpoint_saving=archived"]
    root = ["--experiments_root_path", tmp_path, "--experiment_id", "mine"]
    right = f"checkpoint_saving.archive_path={archive}"
    refused = _call("check", *words, "checkpoint_saving.archive_paht=x")
    assert refused.returncode == 2
    assert "did you mean `checkpoint_saving.archive_path`?" in refused.stderr
    trained = _call("run", *words, *root, "--nproc", 2, right, "checkpoint_saving.k=2")
    assert trained.returncode == 0, trained.stderr
    kept = checkpoints_in(tmp_path / "mine" / "checkpoints", "mine")
    assert [checkpoint.progress.num_seen_steps for checkpoint in kept] == [3, 4]
    archived = checkpoints_in(archive, "mine")
    assert [checkpoint.progress.num_seen_steps for checkpoint in archived] == [1, 2, 3, 4]
    resumed = _call("run", *words, *root, right, "--resume", archived[1].path, "checkpoint_saving.k=0")
    assert resumed.returncode == 0, resumed.stderr
    assert "step 2, from" in resumed.stdout
