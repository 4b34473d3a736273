"""How runs end that cannot go on, or are asked to stop: what is told, with which exit code, and what is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from modalities.checkpointing.discovery import checkpoints_in
from modalities.checkpointing.reading.loading import verify_together
from modalities.testing.tiny import tiny_config, write_config, write_tokens

NAMESPACE = ["unshare", "--map-root-user", "--mount", "--", "bash", "-c"]
"""In which a file system may be mounted that nobody else sees."""

_can_mount = (
    shutil.which("unshare") is not None
    and subprocess.run([*NAMESPACE, "mount -t tmpfs tmpfs /mnt"], capture_output=True, check=False).returncode == 0
)
needs_mounts = pytest.mark.skipif(not _can_mount, reason="this machine does not let its users mount a tmpfs")


def _words(config: Path, experiment_id: str, *more: object, root: Path | None = None) -> list[str]:
    words = [sys.executable, "-m", "modalities", "run", "--config", config]
    words += ["--experiments_root_path", root or config.parent, "--experiment_id", experiment_id, *more]
    return [str(word) for word in words]


def _call(words: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment, check=False)


def _on_small_disk(folder: Path, options: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command whose disk is a small one; what lies on it in the end is copied to ``left``."""
    (folder / "disk").mkdir(exist_ok=True)
    script = f'mount -t tmpfs -o {options} tmpfs "$0/disk"; "$@"; code=$?; cp -r "$0/disk" "$0/left"; exit $code'
    return _call([*NAMESPACE, script, str(folder), *words])


@needs_mounts
@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_a_disk_that_fills_up_ends_the_run_with_what_is_left(tmp_path: Path, wrapper: str) -> None:
    tree = tiny_config(tmp_path, wrapper=wrapper, num_steps=60, checkpointing_interval=1)
    config = write_config(tree, tmp_path / "config.yaml")
    words = _words(config, "full", "--nproc", 2, root=tmp_path / "disk")
    outcome = _on_small_disk(tmp_path, "size=3m", words)
    assert (outcome.returncode, "Traceback" in outcome.stderr) == (2, False), outcome.stderr
    error = outcome.stderr[outcome.stderr.index("error: ") :]
    assert "No space left on device" in error.splitlines()[0]
    left = checkpoints_in(tmp_path / "left" / "full" / "checkpoints")
    assert len(left) >= 3
    for checkpoint in left:
        verify_together(checkpoint, "full")
    assert f"the one before it is {left[-1].path.name}" in error
    # on a larger disk
    shutil.copytree(tmp_path / "left", tmp_path / "disk", dirs_exist_ok=True)
    resumed = _call([*words, "--resume", "auto"])
    assert resumed.returncode == 0, resumed.stderr
    assert left[-1].path.name in resumed.stdout


@needs_mounts
def test_too_small_a_disk_is_told_before_the_first_step(tmp_path: Path) -> None:
    tree = tiny_config(tmp_path, n_layer=4)
    tree["checkpoint_saving"]["config"]["checkpoint_saving_strategy"]["config"]["k"] = 3
    words = _words(write_config(tree, tmp_path / "config.yaml"), "small", root=tmp_path / "disk")
    outcome = _on_small_disk(tmp_path, "size=400k", words)
    assert (outcome.returncode, "Traceback" in outcome.stderr) == (2, False), outcome.stderr
    assert "has 0.4 MB free, but 3 checkpoints and one in flight of about 0.2 MB each need 0.6 MB" in outcome.stderr
    assert not (tmp_path / "left" / "small").exists()


@needs_mounts
def test_a_folder_that_cannot_be_written_is_told_before_the_first_step(tmp_path: Path) -> None:
    tree = tiny_config(tmp_path)
    execution = tree["checkpoint_saving"]["config"]["checkpoint_saving_execution"]["config"]
    execution["checkpoint_path"] = str(tmp_path / "disk")
    outcome = _on_small_disk(tmp_path, "ro", _words(write_config(tree, tmp_path / "config.yaml"), "closed"))
    assert (outcome.returncode, "Traceback" in outcome.stderr) == (2, False), outcome.stderr
    assert f"{tmp_path / 'disk'}: Read-only file system" in outcome.stderr
    assert not (tmp_path / "closed").exists()


def test_an_id_that_makes_too_long_names_is_told_before_the_first_step(tmp_path: Path) -> None:
    config = write_config(tiny_config(tmp_path), tmp_path / "config.yaml")
    outcome = _call(_words(config, "x" * 150))
    assert (outcome.returncode, "Traceback" in outcome.stderr) == (2, False), outcome.stderr
    assert "choose a shorter --experiment_id" in outcome.stderr
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def _start(config: Path, experiment_id: str, *more: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        _words(config, experiment_id, *more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _endless(folder: Path, **options: Any) -> dict[str, Any]:
    tree = tiny_config(folder, num_steps=1_000_000, **options)
    tree["checkpoint_saving"]["config"]["checkpoint_saving_strategy"]["config"]["k"] = 1
    return tree


def test_a_time_limit_ends_a_run_like_a_scheduler_does(tmp_path: Path) -> None:
    config = write_config(_endless(tmp_path, checkpointing_interval=1000), tmp_path / "config.yaml")
    begun = time.monotonic()
    outcome = _call(_words(config, "limited", "--nproc", 2, "--max-time", 15))
    assert outcome.returncode == 0, outcome.stderr
    assert 5 < time.monotonic() - begun < 25, "the limit counts from the start of the command"
    newest = checkpoints_in(tmp_path / "limited" / "checkpoints")[-1]
    assert f"preempted at step {newest.progress.num_seen_steps} of" in outcome.stdout
    assert "--resume auto" in outcome.stdout


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_scheduler_is_heard_during_an_evaluation(tmp_path: Path) -> None:
    tree = _endless(tmp_path, checkpointing_interval=1)
    config = write_config(tree, tmp_path / "config.yaml")
    write_tokens(tmp_path / "heldout.pbin", 4_000_000, 128)  # an evaluation of minutes
    process = _start(config, "evaluating", "--nproc", 2)
    # the first step is logged before its evaluation begins
    _wait_for(tmp_path / "evaluating" / "metrics.jsonl", process)
    time.sleep(1)
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert time.monotonic() - begun < 20
    assert "preempted at step 1 of" in output
    assert [c.progress.num_seen_steps for c in checkpoints_in(tmp_path / "evaluating" / "checkpoints")] == [1]


def test_a_second_run_into_the_same_folder_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    config = write_config(_endless(tmp_path, checkpointing_interval=50), tmp_path / "config.yaml")
    first = _start(config, "taken")
    try:
        _wait_for(tmp_path / "taken" / "checkpoints" / "last_checkpoint_info.json", first)
        second = _call(_words(config, "taken", "--resume", "auto", "--max-time", 1))
        assert (second.returncode, "Traceback" in second.stderr) == (2, False), second.stderr
        assert f"another run writes checkpoints of taken to {tmp_path}/taken/checkpoints: process {first.pid} on" in (
            second.stderr
        )
    finally:
        first.kill()
        first.communicate()
    third = _call(_words(config, "taken", "--resume", "auto", "--max-time", 1))
    assert third.returncode == 0, third.stderr


def _ranks_of(launcher: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"modalities" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _has_ended(pid: int) -> bool:
    """Also if its parent has not taken note yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_frozen_launcher_holds_up_nobody_beyond_the_deadline(tmp_path: Path) -> None:
    tree = _endless(tmp_path, checkpointing_interval=20)
    tree["checkpoint_saving"]["config"]["checkpoint_saving_execution"]["config"]["timeout_s"] = 3
    launcher = _start(write_config(tree, tmp_path / "config.yaml"), "frozen", "--nproc", 2)
    try:
        _wait_for(tmp_path / "frozen" / "checkpoints" / "last_checkpoint_info.json", launcher)
        ranks = _ranks_of(launcher)
        assert len(ranks) == 2
        launcher.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while not all(map(_has_ended, ranks)):
            assert time.monotonic() < deadline, "a rank waits for the launcher"
            time.sleep(0.1)
    finally:
        launcher.send_signal(signal.SIGCONT)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 2, errors
    assert "no answer within 3 s" in errors
    assert "Traceback" not in errors


def test_a_killed_rank_is_named_first_with_how_to_go_on(tmp_path: Path) -> None:
    config = write_config(_endless(tmp_path, checkpointing_interval=20), tmp_path / "config.yaml")
    launcher = _start(config, "killed", "--nproc", 2)
    _wait_for(tmp_path / "killed" / "checkpoints" / "last_checkpoint_info.json", launcher)
    os.kill(_ranks_of(launcher)[1], signal.SIGKILL)
    _, errors = launcher.communicate(timeout=60)
    told = [line for line in errors.splitlines() if not line.startswith(("INFO", "WARNING"))]
    assert launcher.returncode == 1
    assert told[0] == "error: rank 1 was killed by SIGKILL (out of memory, or by hand); the other ranks were ended"
    assert "Traceback" not in errors
    assert "--resume auto" in errors
