"""Many runs of one config, each a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from modalities.exceptions import ConfigError, UserError
from modalities.run import RunRequest, run
from modalities.sweep import Job, JobResult, prepare, run_here, run_jobs, run_with_submitit
from modalities.sweep_report import print_table, write_plot
from modalities.testing.tiny import tiny_config, write_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tiny_config(tmp_path, num_steps=2, checkpointing_interval=2), tmp_path / "exp.yaml")


def _request(config: Path, *words: str, **more: object) -> RunRequest:
    return RunRequest(config, experiments_root=config.parent / "runs", overrides=words, **more)  # type: ignore[arg-type]


def test_the_command_sweeps_and_tells_what_came_out(config: Path) -> None:
    words = ["run", "-m", "--config", config, "--experiments_root_path", config.parent / "runs", "--experiment_id", "s"]
    command = [sys.executable, "-m", "modalities", *map(str, words), "lr_scheduler.max_lr=1e-3,1e-2", "model.n_layer=1"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "150"})
    assert done.returncode == 0, done.stderr
    folder = config.parent / "runs" / "s"
    kept = json.loads((folder / "sweep.json").read_text())
    assert [job["overrides"] for job in kept] == [
        [f"lr_scheduler.max_lr={lr}", "model.n_layer=1"] for lr in ("0.001", "0.01")
    ]
    for index, (job, lr) in enumerate(zip(kept, (1e-3, 1e-2), strict=True)):
        run = folder / f"job-{index}"
        assert job["exit_code"] == 0
        assert job["losses"]["heldout CLMCrossEntropyLoss"] > 0
        assert (
            yaml.safe_load((folder / "configs" / f"job-{index}.yaml").read_text())["lr_scheduler"]["config"]["max_lr"]
            == lr
        )
        assert yaml.safe_load((run / "config.resolved.yaml").read_text())["lr_scheduler"]["config"]["max_lr"] == lr
    assert (folder / "sweep.png").stat().st_size > 1000
    table = done.stdout[done.stdout.rindex("job ") :].splitlines()
    assert table[0].split()[:2] == ["job", "lr_scheduler.max_lr"]
    assert "n_layer" not in table[0]  # the same in all jobs
    assert [line.split()[-1] for line in table[1:3]] == ["finished", "finished"]
    assert table[1].count("*") + table[2].count("*") == 1


def test_no_job_starts_if_one_has_a_fault(config: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(_request(config, "optimizer.lr=1e-3,-1", "model.n_layer=1,2"))
    assert "jobs: 2 of 4 jobs, first: optimizer.lr=-1 model.n_layer=1" in str(caught.value)
    assert "2 of 4 jobs have faults; nothing was started." in str(caught.value)
    assert str(caught.value).count("must be at least 0") == 1
    assert not (config.parent / "runs").exists()


def test_a_fault_of_all_jobs_is_told_once(config: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(_request(config, "optimizer.lr=1e-3,1e-2", "model.n_layer=0"))
    assert "jobs: all jobs" in str(caught.value)


def test_a_sweep_is_refused_inside_a_launcher(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="does not run inside torchrun"):
        prepare(_request(config, "optimizer.lr=1e-3,1e-2"))


def test_a_sweep_does_not_resume_and_does_not_mix_with_another(config: Path) -> None:
    with pytest.raises(UserError, match="--resume goes on with one run"):
        prepare(_request(config, resume="auto"))
    prepare(_request(config, experiment_id="s"))
    with pytest.raises(UserError, match="there is a sweep in"):
        prepare(_request(config, experiment_id="s"))


def test_several_values_without_multirun_are_refused(config: Path) -> None:
    command = [sys.executable, "-m", "modalities", "run", "--config", str(config), "optimizer.lr=1e-3,1e-2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=config.parent)
    assert done.returncode == 2
    assert "add --multirun" in done.stderr


def test_a_job_that_fails_does_not_stop_the_others(config: Path) -> None:
    jobs = prepare(_request(config, "optimizer.lr=1e-3,1e-2", "model.n_layer=1", experiment_id="s"))
    jobs[0].config.write_text("broken: [")
    results = run_jobs(jobs, run_here)
    assert [result.exit_code for result in results] == [2, 0]
    assert results[0].losses == {}
    assert [entry["exit_code"] for entry in json.loads((jobs[0].folder / "sweep.json").read_text())] == [2, 0]


def test_ctrl_c_ends_the_present_job_and_starts_no_other(config: Path) -> None:
    words = ["run", "-m", "--config", config, "--experiments_root_path", config.parent / "runs", "--experiment_id", "s"]
    command = [sys.executable, "-m", "modalities", *map(str, words), "optimizer.lr=1e-3,1e-2"]
    many = ["training_target.num_target_steps=100000", "training_target.num_target_tokens=6400000"]
    process = subprocess.Popen(
        [*command, *many, "lr_scheduler.total_steps=100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # tests that run in the background inherit that interrupts are ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    metrics = config.parent / "runs" / "s" / "job-0" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "2 of 2 jobs did not finish" in output
    assert "Traceback" not in output
    assert not (config.parent / "runs" / "s" / "job-1").exists()
    assert list((config.parent / "runs" / "s" / "job-0" / "checkpoints").glob("eid_*"))  # it was let save


def test_submitit_runs_each_job_as_its_tasks(config: Path) -> None:
    """On this machine in place of a cluster: two tasks per job make one run of two ranks."""
    jobs = prepare(_request(config, "optimizer.lr=1e-3,1e-2", "model.n_layer=1", experiment_id="s", num_processes=None))
    launch = run_with_submitit(["cluster=local", "tasks_per_node=2", "timeout_min=5"])
    results = run_jobs(jobs, launch)
    assert [result.exit_code for result in results] == [0, 0]
    started = json.loads((jobs[0].folder / "job-0" / "run.json").read_text())
    assert started[-1]["world_size"] == 2


def test_submitit_s_refusals_are_told() -> None:
    with pytest.raises(UserError, match="write NAME=VALUE"):
        run_with_submitit(["slurm_partition"])
    launch = run_with_submitit(["cluster=local", "no_such_parameter=3"])
    with pytest.raises(UserError, match="submitit refuses"):
        launch([Job("job-0", (), Path("x.yaml"), Path("/tmp/modalities-no-such-folder"))])


def test_the_table_and_the_plot_do_without_results(tmp_path: Path) -> None:
    from rich.console import Console

    job = Job("job-0", ("a=1",), tmp_path / "x.yaml", tmp_path)
    console = Console(record=True, width=100)
    print_table([JobResult(job, 1, 0.5)], console)
    assert "exit code 1" in console.export_text()
    assert write_plot([JobResult(job, 1, 0.5)], tmp_path) is not None


def test_every_job_of_a_sweep_begins_as_the_command_says(config: Path) -> None:
    runs = config.parent / "runs"
    run(_request(config, experiment_id="parent"))
    longer = write_config(
        tiny_config(config.parent, num_steps=4, checkpointing_interval=2), config.parent / "longer.yaml"
    )
    request = _request(
        longer,
        "optimizer.eps=1e-8,1e-6",
        fork=str(runs / "parent"),
        at_step=2,
        allow_changed=("lr_scheduler.total_steps", "optimizer.eps"),
    )
    results = run_jobs(prepare(request), run_here)
    assert [result.exit_code for result in results] == [0, 0]
    for result in results:
        (started,) = json.loads((result.job.folder / result.job.name / "run.json").read_text())
        assert (started["origin"]["kind"], started["origin"]["num_seen_steps"]) == ("fork", 2)
