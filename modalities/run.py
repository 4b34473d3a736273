"""The composition root: config to registry to factory to trainer."""

from __future__ import annotations

import logging
import os
import re
import shlex
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import xxhash
from pydantic import BaseModel

from modalities.checkpointing.discovery import Checkpoint, checkpoints_in
from modalities.checkpointing.history import history_of, next_start, starts_of
from modalities.checkpointing.manifest import Manifest, Start, read_manifest
from modalities.checkpointing.storage import as_location
from modalities.composition.compose import ComposedConfig, ConfigRequest, RecipeChoice, compose_config
from modalities.composition.schema import Schema
from modalities.composition.sweeps import jobs_of
from modalities.config.dumping import dump_resolved
from modalities.config.environment import Environment
from modalities.config.yaml_loader import load_yaml
from modalities.exceptions import CheckpointError, Interrupted, RunsPart, UserError
from modalities.factory.build import build
from modalities.factory.plan import Plan, make_plan
from modalities.progress import TrainingProgress
from modalities.registry.registry import Registry
from modalities.run_folder import (
    Origin,
    RunFolder,
    checkpoints_of_run,
    find_checkpoint,
    find_weights,
    new_experiment_id,
    newest_run_of,
)
from modalities.training.changes import DATA
from modalities.training.meaning import Meaning, meaning_of
from modalities.training.recipe import Settings, TrainingRecipe

if TYPE_CHECKING:
    from modalities.checkpointing.checkpoint_saving import CheckpointSaving
    from modalities.training.parting import Watch

logger = logging.getLogger(__name__)

NUM_PROCESSES_VARIABLE = "MODALITIES_NPROC"
"""Set for the processes that ``--nproc`` starts, to their number."""

BEGAN_AT_VARIABLE = "MODALITIES_BEGAN_AT"
"""Set for the processes that ``--nproc`` starts, to when the launcher began (``time.monotonic``)."""

_EXPERIMENT_ID = re.compile(r"\w[\w .+@=-]*")

R = TypeVar("R", bound=BaseModel)


@dataclass(frozen=True)
class RunRequest:
    """What the user asked for.

    Args:
        config: The experiment's YAML file.
        experiments_root: Folder that holds the run folders.
        experiment_id: Name of the run's folder; made from the time and the config's name if not given.
        resume: ``none``, ``auto`` (the newest checkpoint of this run, if any) or the path of a checkpoint or run.
        fork: Checkpoint or run that a new run branches off from, keeping counters, optimizer and data position.
        init_from: Checkpoint or run whose weights a new run starts with.
        at_step: Which of the checkpoints of ``fork`` or ``init_from``; None for the newest.
        check_against: Another run's folder; where this run is no longer equal to it, it ends.
        allow_changed: Paths of the config that may mean something else than in the checkpoint; ``all`` for any.
        last_checkpoint_info: For a warm start whose config asks for ``${warmstart_env:checkpoint_paths}``.
        overrides: Hydra's override words, such as ``optimizer.lr=3e-4``.
        config_folders: Further folders with groups for defaults lists.
        imports: Modules and ``.py`` files that register components.
        num_processes: How many processes the run will have, where no launcher has started them yet.
        max_time_s: Seconds from the command's start after which the run saves and stops, if it has a limit.
        began_at: When the command started (``time.monotonic``).
    """

    config: Path
    experiments_root: Path = Path("experiments")
    experiment_id: str | None = None
    resume: str = "none"
    fork: str | None = None
    init_from: str | None = None
    at_step: int | None = None
    check_against: Path | None = None
    allow_changed: tuple[str, ...] = ()
    last_checkpoint_info: Path | None = None
    overrides: tuple[str, ...] = ()
    config_folders: tuple[Path, ...] = ()
    imports: tuple[str, ...] = ()
    num_processes: int | None = None
    max_time_s: float | None = None
    began_at: float = field(default_factory=lambda: float(os.environ.get(BEGAN_AT_VARIABLE, time.monotonic())))

    def with_overrides(self, overrides: tuple[str, ...]) -> RunRequest:
        return replace(self, overrides=overrides)

    @property
    def words_of_start(self) -> list[str]:
        """What the command line says of how the run begins and what it is held against, but for ``--resume``."""
        words = {
            "--fork": self.fork,
            "--init-from": self.init_from,
            "--at-step": self.at_step,
            "--check-against": self.check_against,
        }
        given = [part for word, value in words.items() if value is not None for part in (word, str(value))]
        return given + [part for path in self.allow_changed for part in ("--allow-changed", path)]

    def config_request(self, experiment_id: str) -> ConfigRequest:
        environment = Environment(
            self.config, self.experiments_root, experiment_id, self.last_checkpoint_info, self.num_processes
        )
        return ConfigRequest(environment, self.overrides, self.config_folders, self.imports)


@dataclass(frozen=True)
class RunSummary:
    """How a run ended.

    Args:
        run_folder: The run's folder.
        progress: How far it got.
        is_finished: Whether nothing is left to do, be it only an evaluation.
        last_checkpoint: What to go on from.
        has_own_checkpoint: Whether the run itself has written a checkpoint, now or before.
    """

    run_folder: Path
    progress: TrainingProgress
    is_finished: bool
    last_checkpoint: Path | None
    has_own_checkpoint: bool


def compose(
    request: RunRequest, recipe: RecipeChoice = TrainingRecipe, registry: Registry | None = None
) -> ComposedConfig:
    """The canonical tree of a request, for a run that would start now.

    Raises:
        ConfigError: The file cannot be read; every other fault is collected.
    """
    experiment_id = request.experiment_id or new_experiment_id(request.config)
    return compose_config(request.config_request(experiment_id), recipe, registry)


def check(request: RunRequest, registry: Registry | None = None, recipe: RecipeChoice = TrainingRecipe) -> Plan:
    """Check a config without importing torch; nothing is built.

    Args:
        request: What the user asked for.
        registry: With components of one's own; by default the standard one with the request's imports.
        recipe: What the file is for, or what tells it.

    Returns:
        The plan; its faults tell what is wrong.

    Raises:
        ConfigError: The file cannot be read.
    """
    return plan_of(compose(request, recipe, registry))


def jobs_of_sweep(request: RunRequest, recipe: RecipeChoice = TrainingRecipe) -> list[tuple[str, ...]]:
    """The override words of every job of a request whose overrides give several values.

    Raises:
        ConfigError: A word is no override, or the file cannot be read.
    """
    from modalities.composition.defaults_list import options_of

    def options(key: str) -> list[str]:
        chosen = recipe if isinstance(recipe, type) else recipe(load_yaml(request.config, []))
        return options_of(key, request.config, list(request.config_folders), Schema(Registry.standard(), chosen))

    return jobs_of(request.config, request.overrides, options)


def plan_of(composed: ComposedConfig) -> Plan:
    """The checked plan of a composed config."""
    schema = composed.schema
    return make_plan(composed.tree, schema.registry, schema.recipe, composed.faults, composed.reads())


def build_from_file(
    config: Path, recipe: type[R], registry: Registry | None = None, overrides: tuple[str, ...] = ()
) -> R:
    """Build what another recipe than a training run's needs from a YAML file.

    Raises:
        ConfigError: The config has faults.
    """
    return build(check(RunRequest(config, overrides=overrides), registry, recipe), recipe)


def run(request: RunRequest, registry: Registry | None = None) -> RunSummary:
    """Run an experiment to its end; under a launcher, as one of its ranks.

    Raises:
        UserError: The config, the data, a checkpoint or a folder is not as it must be.
        Interrupted: It was asked to stop; a checkpoint is saved.
    """
    from modalities.parallel.process_group import on_rank_zero, process_group
    from modalities.training.determinism import deterministic

    with process_group():
        experiment_id = on_rank_zero(lambda: _choose_experiment_id(request))
        composed = compose_config(request.config_request(experiment_id), TrainingRecipe, registry)
        plan = plan_of(composed)
        with deterministic(bool(plan.roots.get("settings", {}).get("deterministic", False))):
            return _run(request, plan, composed, RunFolder(request.experiments_root / experiment_id))


def _run(request: RunRequest, plan: Plan, composed: ComposedConfig, folder: RunFolder) -> RunSummary:
    from modalities.checkpointing.resume_state import ResumeState, restore_rng_state, seed_generators
    from modalities.parallel.process_group import all_gathered, global_rank, machine_device, on_rank_zero, world_size
    from modalities.tracking.metrics_file import MetricsFile
    from modalities.training.assembly import check_consistency, make_trainer, print_banner, start_progress
    from modalities.training.parting import DigestFile
    from modalities.training.resuming import GoingOn, init_from_, loading_whole, resume_newest_, warmstart_state
    from modalities.training.stopping import StopRequest
    from modalities.training.trainer import num_owed_evaluations

    seed = plan.roots.get("settings", {}).get("seed", Settings.model_fields["seed"].default)
    seed_generators(seed)  # the same on all ranks while they build
    recipe = build(plan, TrainingRecipe)
    settings: Settings = recipe.settings
    check_consistency(recipe)
    on_rank_zero(folder.create)
    progress = start_progress(settings)
    saving: CheckpointSaving = recipe.checkpoint_saving
    resolved = dump_resolved(composed.tree, composed.imports)
    saving.config_hash = xxhash.xxh3_128_hexdigest(resolved.encode())
    meaning = on_rank_zero(lambda: _with_content(meaning_of(composed), recipe.train_dataset))
    saving.config = meaning.values
    resume_state: ResumeState | None = warmstart_state(settings)
    checkpoint: Checkpoint | None = None
    origin: Origin | None = None
    watch: Watch | None = None
    try:
        saving.rehearse(recipe.app_state)
        if settings.deterministic or request.check_against is not None:
            watch = _watch(request, recipe, folder)
        candidates = on_rank_zero(lambda: _resume_candidates(request, saving, folder))
        checkpoint_loading = recipe.checkpoint_loading
        if request.resume == "auto":
            checkpoint_loading = loading_whole(checkpoint_loading)
        if candidates:
            going_on = GoingOn(progress, settings, meaning, request.allow_changed, checkpoint_loading)
            checkpoint, progress, resume_state = resume_newest_(recipe.app_state, candidates, going_on)
            origin = Origin.of(checkpoint, "fork" if request.fork and _is_foreign(checkpoint, saving) else "resume")
        elif request.init_from is not None:
            weights = on_rank_zero(lambda: find_weights(as_location(request.init_from or ""), request.at_step))
            init_from_(recipe.app_state, weights, recipe.checkpoint_loading)
            origin = Origin.of_weights(weights)
        saving.start = on_rank_zero(lambda: _this_start(saving, folder, checkpoint, progress))
    except UserError:
        saving.close()
        if global_rank() == 0:
            folder.remove_if_empty()
        raise
    metrics = MetricsFile(folder.metrics_file)

    def record() -> None:
        folder.record(
            composed.files,
            composed.text,
            resolved,
            list(request.overrides),
            world_size(),
            saving.checkpoint_path,
            saving.experiment_id,
            saving.start,
            origin,
        )
        owed = num_owed_evaluations(recipe.app_state)
        tags = [loader.dataloader_tag for loader in recipe.eval_dataloaders]
        metrics.rewind(progress.num_seen_steps, tags[len(tags) - owed :])
        DigestFile(folder.digest_file).rewind(progress.num_seen_steps)

    on_rank_zero(record)
    trainer = make_trainer(recipe, machine_device(), [metrics], watch)
    trainer.last_checkpoint = checkpoint.path if checkpoint is not None else None
    if global_rank() == 0:
        print_banner(recipe, machine_device(), progress, origin, folder.path)

    def set_random_states() -> None:
        # ranks must drop different activations
        seed_generators(settings.seed + 1 + global_rank())
        if resume_state is not None:
            restore_rng_state(resume_state)

    # a queue's clock runs while imports, data and models are read, too
    ends_at = None if request.max_time_s is None else request.began_at + request.max_time_s
    stop_request = StopRequest(ends_at)
    try:
        with stop_request.listening():
            progress = trainer.train(progress, stop_request, set_random_states)
    except CheckpointError as error:
        if global_rank() != 0:
            raise
        raise CheckpointError(f"{error}\n{_what_is_left(request, saving, folder)}") from error
    finally:
        trainer.close()
        saving.close()
    has_own = on_rank_zero(lambda: bool(checkpoints_in(saving.checkpoint_path, saving.experiment_id)))
    is_finished = progress.is_finished and not trainer.num_owed_evaluations
    summary = RunSummary(folder.path, progress, is_finished, trainer.last_checkpoint, has_own)
    is_preemption = any(all_gathered(stop_request.is_preemption))
    if global_rank() == 0:
        _print_summary(request, summary, trainer.losses_at(progress.num_seen_steps), is_preemption)
        if watch is not None and request.check_against is not None:
            _print_comparison(request.check_against, watch.num_compared)
    if not is_finished:
        what = f"{'preempted' if is_preemption else 'stopped'} by {stop_request.reason or 'another rank'}"
        raise Interrupted(f"{what} after step {progress.num_seen_steps}", is_preemption=is_preemption)
    return summary


def _watch(request: RunRequest, recipe: TrainingRecipe, folder: RunFolder) -> Watch:
    """What looks at every logged step, for digests or to compare with another run."""
    from modalities.parallel.process_group import global_rank, on_rank_zero
    from modalities.training.parting import DigestFile, OtherRun, Watch

    others: list[OtherRun] = []

    def find() -> None:
        if request.check_against is None:
            return
        other = RunFolder(as_location(request.check_against))
        if other.path.absolute() == folder.path.absolute():
            raise UserError(f"--check-against {other.path} is this run's own folder; give another run's")
        tag = recipe.train_dataloader.dataloader_tag
        found = checkpoints_of_run(other.path)
        others.append(OtherRun(str(other.path), other.metrics_file, other.digest_file, tag, found))

    on_rank_zero(find)
    digest_file = DigestFile(folder.digest_file) if recipe.settings.deterministic else None
    other = others[0] if global_rank() == 0 and others else None
    return Watch(recipe.app_state, digest_file, other, request.check_against is not None)


def _choose_experiment_id(request: RunRequest) -> str:
    if request.experiment_id is not None:
        if not _EXPERIMENT_ID.fullmatch(request.experiment_id):
            raise UserError(
                f"{request.experiment_id!r} cannot name a run folder: use letters, digits, spaces and . _ - + @ =, "
                "a letter or digit first"
            )
        return request.experiment_id
    if request.fork is not None or request.init_from is not None:
        return new_experiment_id(request.config)
    if request.resume == "auto":
        newest = newest_run_of(request.config, request.experiments_root)
        if newest is not None:
            return newest.name
        logger.info("no run of %s in %s yet: starting afresh", request.config, request.experiments_root)
    elif request.resume != "none":
        return find_checkpoint(as_location(request.resume)).experiment_id
    return new_experiment_id(request.config)


def _resume_candidates(request: RunRequest, saving: CheckpointSaving, folder: RunFolder) -> list[Checkpoint]:
    """Checkpoints that the run may go on from, best first."""
    own = checkpoints_in(saving.checkpoint_path, saving.experiment_id)
    if request.resume == "auto":
        history = history_of(starts_of(own), folder.starts())
        for checkpoint in reversed(history.left):
            has_manifest = checkpoint.manifest_path.is_file()
            why = (
                "the run has gone back behind it"
                if has_manifest
                else "it has no manifest, which the run's own ones have"
            )
            logger.warning("passed over %s: %s", checkpoint.path.name, why)
        return list(history.current) or _forked(request)
    if request.resume != "none":
        return [find_checkpoint(as_location(request.resume))]
    if own:
        raise UserError(
            f"the run {saving.experiment_id} has checkpoints already, the newest of step "
            f"{own[-1].progress.num_seen_steps} in {saving.checkpoint_path}; "
            "go on from it with --resume auto, or choose another --experiment_id"
        )
    return _forked(request)


def _forked(request: RunRequest) -> list[Checkpoint]:
    """What a run without a checkpoint of its own branches off from, if it does."""
    return [] if request.fork is None else [find_checkpoint(as_location(request.fork), request.at_step)]


def _is_foreign(checkpoint: Checkpoint, saving: CheckpointSaving) -> bool:
    return checkpoint not in checkpoints_in(saving.checkpoint_path, saving.experiment_id)


def _with_content(meaning: Meaning, dataset: object) -> Meaning:
    """The meaning of a config, with what tells the training data itself apart, where the dataset can tell."""
    fingerprint = getattr(dataset, "fingerprint", None)
    if fingerprint is None:
        return meaning
    values, paths = {DATA: fingerprint()}, {DATA: "train_dataset.content"}
    return replace(meaning, values={**meaning.values, **values}, paths={**meaning.paths, **paths})


def _manifest_of(checkpoint: Checkpoint) -> Manifest | None:
    try:
        return read_manifest(checkpoint.manifest_path)
    except CheckpointError:
        return None  # it was loaded unverified, as asked for


def _this_start(
    saving: CheckpointSaving, folder: RunFolder, origin: Checkpoint | None, progress: TrainingProgress
) -> Start:
    own = checkpoints_in(saving.checkpoint_path, saving.experiment_id)
    known = [*folder.starts(), *starts_of(own).values()]
    return next_start(known, _manifest_of(origin) if origin is not None else None, progress.num_seen_steps)


def _print_summary(request: RunRequest, summary: RunSummary, losses: dict[str, float], is_preemption: bool) -> None:
    from modalities.tracking.console import console

    progress = summary.progress
    what = "finished" if summary.is_finished else "preempted" if is_preemption else "stopped"
    console.print(f"\n{what} at step {progress.num_seen_steps} of {progress.num_target_steps}")
    for name, loss in losses.items():
        console.print(f"  {name:<16} {loss:.4f}")
    console.print(f"  run folder       {summary.run_folder}")
    console.print(f"  last checkpoint  {summary.last_checkpoint or 'none'}")
    if summary.is_finished and summary.last_checkpoint is not None:
        # a run that was finished when it was resumed from another's checkpoint has none of its own
        target = summary.run_folder if summary.has_own_checkpoint else summary.last_checkpoint
        command = f'modalities generate --checkpoint {shlex.quote(str(target))} --prompt "…"'
        console.print(f"  generate with    {command}")
    elif summary.last_checkpoint is not None:
        console.print(f"  resume with      {resume_command(request, summary.run_folder)}")


def _print_comparison(other: Path, num_compared: int) -> None:
    from modalities.tracking.console import console

    if not num_compared:
        raise RunsPart(f"--check-against {other}: it has logged and saved none of these steps, so nothing was compared")
    console.print(f"  checked          equal to {other} at all {num_compared} steps that both have logged")


def what_a_killed_run_left(request: RunRequest) -> str | None:
    """The newest checkpoint of the run that a request started, and how to go on from it; None if there is none."""
    if request.experiment_id is not None:
        folder: Path | None = request.experiments_root / request.experiment_id
    else:
        folder = newest_run_of(request.config, request.experiments_root)
    try:
        newest = find_checkpoint(folder) if folder is not None else None
    except UserError:
        return None
    if folder is None or newest is None:
        return None
    return f"its newest checkpoint is {newest.path.name}; go on from there with\n  {resume_command(request, folder)}"


def _what_is_left(request: RunRequest, saving: CheckpointSaving, folder: RunFolder) -> str:
    """After a save that failed: the checkpoint before it, and how to go on from there."""
    own = checkpoints_in(saving.checkpoint_path, saving.experiment_id)
    there = history_of(starts_of(own), folder.starts()).current
    if not there:
        return f"there is no checkpoint before it in {saving.checkpoint_path}"
    return (
        f"the one before it is {there[0].path.name}; when the cause is removed, go on from there with\n"
        f"  {resume_command(request, folder.path)}"
    )


def resume_command(request: RunRequest, run_folder: Path) -> str:
    """The command line by which a run goes on from its newest checkpoint."""
    num_processes = os.environ.get(NUM_PROCESSES_VARIABLE)
    nproc = f" --nproc {num_processes}" if num_processes else ""
    words = "".join(f" {shlex.quote(word)}" for word in _repeated_words(request))
    config, root = shlex.quote(str(request.config)), shlex.quote(str(request.experiments_root))
    return (
        f"modalities run --config {config} --experiments_root_path {root} "
        f"--experiment_id {shlex.quote(run_folder.name)}{nproc} --resume auto{words}"
    )


def _repeated_words(request: RunRequest) -> list[str]:
    """What the command line must say again for the run to go on as it was."""
    words = [word for name in request.imports for word in ("--import", name)]
    words += [word for folder in request.config_folders for word in ("--config-dir", str(folder))]
    return [*words, *request.overrides, *request.words_of_start]
