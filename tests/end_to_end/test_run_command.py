"""`modalities run` as its users call it: real processes, real signals, real kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from modalities.checkpointing.discovery import checkpoints_in
from modalities.testing.tiny import tiny_config, write_config

REPOSITORY = Path(__file__).parents[2]
MODALITIES = [sys.executable, "-m", "modalities"]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _call(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=cwd, env=_environment(), check=False
    )


def _run_words(config: Path, experiment_id: str) -> list[object]:
    return ["run", "--config", config, "--experiments_root_path", config.parent, "--experiment_id", experiment_id]


def _results(root: Path, experiment_id: str) -> list[dict[str, Any]]:
    lines = (root / experiment_id / "metrics.jsonl").read_text().splitlines()
    return [
        {key: r[key] for key in ("dataloader_tag", "num_train_steps_done", "losses", "metrics")}
        for r in map(json.loads, lines)
    ]


def _wait_for_checkpoint(folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not checkpoints_in(folder / "checkpoints"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def long_config(tmp_path: Path) -> Path:
    """A run long enough to be killed on the way."""
    return write_config(tiny_config(tmp_path, num_steps=150, checkpointing_interval=30), tmp_path / "config.yaml")


def test_a_run_tells_what_it_does_and_leaves_all_that_made_it(tmp_path: Path) -> None:
    config = write_config(tiny_config(tmp_path), tmp_path / "config.yaml")
    outcome = _call(*MODALITIES, *_run_words(config, "first"))
    assert outcome.returncode == 0, outcome.stderr
    for told in (
        "world size       1",
        "parameters       8,784",
        "tokens per step  64",
        "steps            8",
        "finished",
    ):
        assert told in outcome.stdout
    assert f"modalities generate --checkpoint {tmp_path / 'first'}" in outcome.stdout
    folder = tmp_path / "first"
    assert (folder / "config.yaml").read_text() == config.read_text()
    (started,) = json.loads((folder / "run.json").read_text())
    assert started["packages"]["torch"]
    assert started["command"][-1] == "first"
    assert json.loads((folder / "overrides.json").read_text()) == []


def test_the_resolved_config_reproduces_the_run(tmp_path: Path) -> None:
    config = write_config(tiny_config(tmp_path, dropout=0.2), tmp_path / "config.yaml")
    assert _call(*MODALITIES, *_run_words(config, "first")).returncode == 0
    resolved = tmp_path / "first" / "config.resolved.yaml"
    assert yaml.safe_load(resolved.read_text())["settings"]["experiment_id"] == "${modalities_env:experiment_id}"
    again = _call(
        *MODALITIES, "run", "--config", resolved, "--experiments_root_path", tmp_path, "--experiment_id", "second"
    )
    assert again.returncode == 0, again.stderr
    assert _results(tmp_path, "second") == _results(tmp_path, "first")


def test_torchrun_and_nproc_train_alike(tmp_path: Path) -> None:
    config = write_config(tiny_config(tmp_path), tmp_path / "config.yaml")
    assert _call(*MODALITIES, *_run_words(config, "nproc"), "--nproc", 2).returncode == 0
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        2,
        "-m",
        "modalities",
    ]
    outcome = _call(*torchrun, *_run_words(config, "torchrun"))
    assert outcome.returncode == 0, outcome.stderr
    assert _results(tmp_path, "torchrun") == _results(tmp_path, "nproc")


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_killed_run_resumes_bit_for_bit(long_config: Path, nproc: int) -> None:
    root = long_config.parent
    assert _call(*MODALITIES, *_run_words(long_config, "unbroken"), "--nproc", nproc).returncode == 0
    words = [*MODALITIES, *_run_words(long_config, "killed"), "--nproc", nproc]
    process = subprocess.Popen(
        [str(w) for w in words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
        start_new_session=True,
    )
    _wait_for_checkpoint(root / "killed", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    _kill_session(process.pid)
    resumed = _call(*words, "--resume", "auto")
    assert resumed.returncode == 0, resumed.stderr
    assert "from " in resumed.stdout
    assert _results(root, "killed") == _results(root, "unbroken")


def _kill_session(session: int) -> None:
    """Kill what is left of a session: the launcher's ranks lead process groups of their own."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == session:
                    os.kill(int(entry.name), signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.mark.parametrize(
    ("number", "exit_code", "told"),
    [(signal.SIGINT, 1, "stopped"), (signal.SIGTERM, 0, "preempted"), (signal.SIGUSR1, 0, "preempted")],
)
@pytest.mark.parametrize(("nproc", "num_workers"), [(1, 0), (1, 2), (2, 0)])
def test_a_signal_saves_stops_and_tells_how_to_go_on(
    tmp_path: Path, number: int, exit_code: int, told: str, nproc: int, num_workers: int
) -> None:
    tree = tiny_config(tmp_path, num_steps=100_000, checkpointing_interval=50, num_workers=num_workers)
    tree["checkpoint_saving"]["config"]["checkpoint_saving_strategy"]["config"]["k"] = 2
    config = write_config(tree, tmp_path / "config.yaml")
    words = [*MODALITIES, *_run_words(config, "stopped"), "--nproc", nproc]
    process = subprocess.Popen(
        [str(w) for w in words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
        start_new_session=True,
    )
    _wait_for_checkpoint(tmp_path / "stopped", process)
    # a terminal's Ctrl-C goes to the whole process group, data workers included
    os.killpg(process.pid, number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == exit_code
    assert "Traceback" not in errors
    assert f"{told} at step" in output
    assert "--resume auto" in output
    newest = checkpoints_in(tmp_path / "stopped" / "checkpoints")[-1]
    assert f"{told} at step {newest.progress.num_seen_steps} of" in output


def test_a_killed_rank_ends_the_job_within_seconds(long_config: Path) -> None:
    words = [*MODALITIES, *_run_words(long_config, "killed"), "--nproc", 2]
    process = subprocess.Popen(
        [str(w) for w in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment()
    )
    _wait_for_checkpoint(long_config.parent / "killed", process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [pid for pid in children if b"modalities" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(ranks) == 2
    os.kill(int(ranks[1]), signal.SIGKILL)
    start = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert time.monotonic() - start < 30


def test_quickstart_trains_and_generates(tmp_path: Path) -> None:
    """The shipped config, shortened, from raw text to generated text."""
    config = REPOSITORY / "config_files" / "training" / "quickstart.yaml"
    overrides = ["training_target.num_target_steps=2", "lr_scheduler.warmup_steps=1"]
    overrides += [f"intervals.{what}_interval_in_steps=2" for what in ("checkpointing", "evaluation")]
    overrides += [f"paths.{name}_dataset_path={tmp_path / name}.pbin" for name in ("train", "heldout")]
    words = ["run", "--config", config, "--experiments_root_path", tmp_path, "--experiment_id", "quick"]
    trained = _call(*MODALITIES, *words, *overrides, cwd=REPOSITORY)
    assert trained.returncode == 0, trained.stderr
    prompt = "It is a truth"
    words = ["generate", "--checkpoint", tmp_path / "quick", "--prompt", prompt, "--max-new-tokens", 8, "--seed", 3]
    first, second = (_call(*MODALITIES, *words, cwd=REPOSITORY) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith(prompt)
    assert len(first.stdout) > len(prompt) + 1
    assert second.stdout == first.stdout
    refused = _call(*MODALITIES, *words, "--top-p", 2, cwd=REPOSITORY)
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)


def test_warmstart_goes_on_as_existing_scripts_do(tmp_path: Path) -> None:
    tree = tiny_config(tmp_path)
    config = write_config(tree, tmp_path / "config.yaml")
    assert _call(*MODALITIES, *_run_words(config, "unbroken")).returncode == 0
    halfway = checkpoints_in(tmp_path / "unbroken" / "checkpoints")[0].path
    info = tmp_path / "info.json"
    info.write_text(json.dumps({"checkpoint_folder_path": str(halfway)}))
    path = "${settings.warmstart_checkpoint_paths.checkpoint_folder_path}"

    def number(variant: str) -> dict[str, Any]:
        config = {"checkpoint_path": path}
        return {
            "component_key": "number_conversion",
            "variant_key": f"{variant}_from_checkpoint_path",
            "config": config,
        }

    tree["settings"]["warmstart_checkpoint_paths"] = "${warmstart_env:checkpoint_paths}"
    tree["settings"]["training_progress"] = {
        "global_num_seen_tokens": number("global_num_seen_tokens"),
        "num_seen_steps": number("num_seen_steps"),
        "num_seen_samples": 16,
        "last_step": number("last_step"),
    }
    tree["raw_app_state"] = tree["app_state"]
    tree["app_state"] = {
        "component_key": "app_state",
        "variant_key": "dcp",
        "config": {
            "raw_app_state": {"instance_key": "raw_app_state", "pass_type": "BY_REFERENCE"},
            "checkpoint_dir_path": path,
        },
    }
    warm = write_config(tree, tmp_path / "warmstart.yaml")
    outcome = _call(
        *MODALITIES,
        "warmstart",
        "--config_file_path",
        warm,
        "--experiments_root_path",
        tmp_path,
        "--experiment_id",
        "warm",
        "--last_checkpoint_info_file_path",
        info,
    )
    assert outcome.returncode == 0, outcome.stderr
    later = [r for r in _results(tmp_path, "unbroken") if r["num_train_steps_done"] > 4]
    assert _results(tmp_path, "warm") == later


@pytest.mark.parametrize("nproc", [1, 2])
def test_mistakes_end_with_exit_code_two_and_no_traceback(tmp_path: Path, nproc: int) -> None:
    def outcome(tree: dict[str, Any], *words: object) -> str:
        config = write_config(tree, tmp_path / "config.yaml")
        done = _call(*MODALITIES, *_run_words(config, "mistake"), "--nproc", nproc, *words)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    wrong_mesh = tiny_config(tmp_path)
    wrong_mesh["device_mesh"]["config"]["data_parallel_shard_degree"] = 3
    assert f"the degrees 3 do not fit a world of {nproc} process" in outcome(wrong_mesh)

    other_vocabulary = tiny_config(tmp_path, vocab_size=300)
    other_vocabulary["model_raw"]["config"]["vocab_size"] = 64
    assert "vocabulary has 64 ids" in outcome(other_vocabulary)

    assert "no such checkpoint" in outcome(tiny_config(tmp_path), "--resume", tmp_path / "nowhere")

    assert not (tmp_path / "mistake").exists()

    for key, place in (("prediction_key", "loss_fn"), ("target_key", "loss_fn"), ("sample_key", "model_raw")):
        other_name = tiny_config(tmp_path)
        other_name[place]["config"][key] = "other"
        assert f"their {key} differs" in outcome(other_name)

    half_the_data = tiny_config(tmp_path)
    sampler = half_the_data["train_dataloader"]["config"]["batch_sampler"]["config"]["sampler"]
    sampler["config"]["num_replicas"] = 3
    assert "deals samples out to 3 replicas" in outcome(half_the_data)

    (tmp_path / "occupied").touch()
    assert "run folder" in outcome(tiny_config(tmp_path), "--experiments_root_path", tmp_path / "occupied" / "below")

    full = _call(
        "bash", "-c", 'ulimit -f 4; exec "$@"', "-", *MODALITIES, *_run_words(tmp_path / "config.yaml", "full")
    )
    assert (full.returncode, "Traceback" in full.stderr) == (2, False), full.stderr
    assert "File too large" in full.stderr

    truncated = tiny_config(tmp_path)
    data = tmp_path / "train.pbin"
    os.truncate(data, data.stat().st_size // 2)
    assert "truncated" in outcome(truncated)
