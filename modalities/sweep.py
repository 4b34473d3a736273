"""Many runs of one config: every job validated before the first starts, each from its own resolved file."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modalities.config.dumping import dump_resolved
from modalities.config.faults import Fault, errors_of
from modalities.exceptions import ConfigError, UserError
from modalities.run import compose, jobs_of_sweep, plan_of
from modalities.run_folder import RunFolder, new_experiment_id
from modalities.run_request import RunRequest

logger = logging.getLogger(__name__)

RESULTS_FILE = "sweep.json"


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Args:
        name: Of its run folder, in the sweep's folder.
        words: Its overrides.
        config: Its resolved config.
        folder: The sweep's folder.
        imports: Modules and ``.py`` files that register components.
        num_processes: Processes on this machine, if it asks for several.
        max_time_s: Seconds after which it saves and stops, if it has a limit.
        words_of_start: How it begins.
    """

    name: str
    words: tuple[str, ...]
    config: Path
    folder: Path
    imports: tuple[str, ...] = ()
    num_processes: int | None = None
    max_time_s: float | None = None
    words_of_start: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """The command line that runs it."""
        words = [sys.executable, "-m", "modalities", "run", "--config", str(self.config)]
        words += ["--experiments_root_path", str(self.folder), "--experiment_id", self.name]
        words += [word for name in self.imports for word in ("--import", name)]
        words += self.words_of_start
        if self.max_time_s is not None:
            words += ["--max-time", f"{self.max_time_s:.0f}"]
        return words + (["--nproc", str(self.num_processes)] if self.num_processes else [])


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Args:
        job: The job.
        exit_code: 0 if it finished.
        seconds: How long it took.
        losses: The last of each loss, by the data's tag and the loss's name.
        curve: Training loss by optimizer step.
    """

    job: Job
    exit_code: int
    seconds: float
    losses: dict[str, float] = field(default_factory=dict)
    curve: list[tuple[int, float]] = field(default_factory=list)


Launcher = Callable[[Sequence[Job]], list[tuple[int, float]]]
"""Runs jobs; gives the exit code and the seconds of each."""


def prepare(request: RunRequest) -> list[Job]:
    """Validate every job of a sweep, then write each one's resolved config into the sweep's folder.

    Args:
        request: The request, with overrides that give several values.

    Raises:
        ConfigError: A job has faults; nothing is written.
        UserError: It is asked for inside a launcher, or for a resumed or a named run.
    """
    if "RANK" in os.environ:
        raise UserError(
            "a sweep starts processes of its own, so it does not run inside torchrun; start `modalities run --multirun` "
            "alone, with --nproc for several processes each"
        )
    if request.resume != "none":
        raise UserError("--resume goes on with one run; resume a job of a sweep with its own run folder")
    jobs_words = jobs_of_sweep(request)
    composed = [compose(request.with_overrides(words)) for words in jobs_words]
    faults: dict[tuple[str, ...], list[Fault]] = {}
    for words, config in zip(jobs_words, composed, strict=True):
        plan_of(config)
        if errors := errors_of(config.faults):
            faults[words] = errors
    if faults:
        raise ConfigError(_report(faults, len(jobs_words)), [fault for found in faults.values() for fault in found])
    folder = request.experiments_root / (request.experiment_id or f"{new_experiment_id(request.config)}_sweep")
    if folder.exists():
        raise UserError(f"there is a sweep in {folder} already; choose another --experiment_id")
    jobs_folder = folder / "configs"
    jobs_folder.mkdir(parents=True)
    jobs = []
    start = tuple(request.words_of_start)
    for index, (words, config) in enumerate(zip(jobs_words, composed, strict=True)):
        name = f"job-{index:0{len(str(len(jobs_words) - 1))}d}"
        file = jobs_folder / f"{name}.yaml"
        file.write_text(dump_resolved(config.tree, config.imports), encoding="utf-8")
        jobs.append(Job(name, words, file, folder, request.imports, request.num_processes, request.max_time_s, start))
    return jobs


def _report(faults: dict[tuple[str, ...], list[Fault]], num_jobs: int) -> str:
    """Each fault once, with the jobs that have it."""
    told: dict[str, list[tuple[str, ...]]] = {}
    for words, found in faults.items():
        for fault in found:
            told.setdefault(fault.render(), []).append(words)
    parts = []
    for text, having in told.items():
        shown = " ".join(having[0]) or "no override"
        which = "all jobs" if len(having) == num_jobs else f"{len(having)} of {num_jobs} jobs, first: {shown}"
        parts.append(f"{text}\n  jobs: {which}")
    return "\n\n".join([*parts, f"{len(faults)} of {num_jobs} jobs have faults; nothing was started."])


def run_jobs(jobs: Sequence[Job], launcher: Launcher) -> list[JobResult]:
    """Run the jobs and keep their results in the sweep's folder."""
    results = []
    for job, (exit_code, seconds) in zip(jobs, launcher(jobs), strict=False):
        losses, curve = _metrics(RunFolder(job.folder / job.name).metrics_file)
        results.append(JobResult(job, exit_code, seconds, losses, curve))
    if jobs:
        kept = [
            {
                "job": result.job.name,
                "overrides": list(result.job.words),
                "exit_code": result.exit_code,
                "seconds": round(result.seconds, 1),
                "losses": result.losses,
            }
            for result in results
        ]
        (jobs[0].folder / RESULTS_FILE).write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return results


def run_here(jobs: Sequence[Job]) -> list[tuple[int, float]]:
    """Launcher: one job after another on this machine; Ctrl-C ends the present one and starts no other."""
    outcomes: list[tuple[int, float]] = []
    for index, job in enumerate(jobs, start=1):
        logger.info("job %d of %d: %s", index, len(jobs), " ".join(job.words) or "(no overrides)")
        start = time.monotonic()
        process = subprocess.Popen(job.command())
        try:
            exit_code = process.wait()
        except KeyboardInterrupt:
            # the terminal has told the job as well: let it save
            process.wait()
            outcomes.append((process.returncode, time.monotonic() - start))
            break
        outcomes.append((exit_code, time.monotonic() - start))
    return outcomes


def run_with_submitit(parameters: Sequence[str]) -> Launcher:
    """Launcher: a SLURM job for each, through submitit; waits for all of them.

    Args:
        parameters: ``name=value`` of submitit's executor (``slurm_partition=gpu``, ``timeout_min=60``,
            ``tasks_per_node=8``); ``cluster=local`` runs on this machine.

    Raises:
        UserError: submitit is not installed, or a parameter is none.
    """
    try:
        import submitit
    except ImportError as error:
        raise UserError("--launcher submitit needs the package: pip install 'modalities[submitit]'") from error
    given = dict(_parameter(text) for text in parameters)
    cluster = given.pop("cluster", None)

    def launch(jobs: Sequence[Job]) -> list[tuple[int, float]]:
        try:
            executor = submitit.AutoExecutor(folder=jobs[0].folder / "logs", cluster=cluster)
            executor.update_parameters(name="modalities", **given)
        except (RuntimeError, TypeError, NameError, ValueError) as error:
            raise UserError(f"submitit refuses: {error}") from error
        started = time.monotonic()
        with executor.batch():
            submitted = [executor.submit(_run_as_task, job.command()) for job in jobs]
        outcomes = []
        for job, handle in zip(jobs, submitted, strict=True):
            try:
                codes = handle.results()
            except submitit.core.utils.UncompletedJobError as error:
                logger.warning("%s did not end by itself: %s", job.name, str(error).partition("\n")[0])
                codes = [1]
            outcomes.append((max(codes), time.monotonic() - started))
        return outcomes

    return launch


def _parameter(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UserError(f"--slurm {text}: write NAME=VALUE, such as slurm_partition=gpu")
    return name, int(value) if value.isdigit() else value


def _run_as_task(command: list[str]) -> int:
    """In a task of the cluster: become the rank that the scheduler says."""
    import submitit

    task = submitit.JobEnvironment()
    environment = dict(os.environ)
    if task.num_tasks > 1:
        environment |= {
            "RANK": str(task.global_rank),
            "LOCAL_RANK": str(task.local_rank),
            "WORLD_SIZE": str(task.num_tasks),
            "LOCAL_WORLD_SIZE": str(task.num_tasks // task.num_nodes),
            "MASTER_ADDR": task.hostnames[0],
            # the same on all tasks of a job, another for each job
            "MASTER_PORT": str(20_000 + int("".join(c for c in str(task.job_id) if c.isdigit()) or 0) % 20_000),
        }
    return subprocess.run(command, env=environment, check=False).returncode


def _metrics(file: Path) -> tuple[dict[str, float], list[tuple[int, float]]]:
    losses: dict[str, float] = {}
    curve: list[tuple[int, float]] = []
    if not file.is_file():
        return losses, curve
    for line in file.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        for name, value in entry["losses"].items():
            losses[f"{entry['dataloader_tag']} {name}"] = value
        if "train loss avg" in entry["losses"]:
            curve.append((entry["num_train_steps_done"], entry["losses"]["train loss avg"]))
    return losses, curve
