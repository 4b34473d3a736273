"""The composition root: config to registry to factory to trainer."""

from __future__ import annotations

import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import xxhash
from pydantic import BaseModel

from modalities.checkpointing.discovery import Checkpoint, checkpoints_in
from modalities.checkpointing.storage import as_location
from modalities.composition.compose import ComposedConfig, RecipeChoice, compose_config
from modalities.composition.schema import Schema
from modalities.composition.sweeps import jobs_of
from modalities.config.dumping import dump_resolved
from modalities.config.yaml_loader import load_yaml
from modalities.exceptions import CheckpointError, Interrupted, RunsPart, UserError
from modalities.factory.build import build
from modalities.factory.plan import Plan, make_plan
from modalities.progress import TrainingProgress
from modalities.registry.registry import Registry
from modalities.run_folder import (
    RunFolder,
    RunOrigin,
    find_weights,
    new_experiment_id,
)
from modalities.run_request import RunRequest, resume_command
from modalities.run_start import (
    choose_experiment_id,
    is_foreign,
    make_watch,
    resume_candidates,
    this_start,
    what_is_left,
    with_content,
)
from modalities.training.meaning import meaning_of
from modalities.training.recipe import Settings, TrainingRecipe

if TYPE_CHECKING:
    from modalities.checkpointing.checkpoint_saving import CheckpointSaving
    from modalities.training.parting import Watch

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=BaseModel)


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
        experiment_id = on_rank_zero(lambda: choose_experiment_id(request))
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
    meaning = on_rank_zero(lambda: with_content(meaning_of(composed), recipe.train_dataset))
    saving.config = meaning.values
    resume_state: ResumeState | None = warmstart_state(settings)
    checkpoint: Checkpoint | None = None
    origin: RunOrigin | None = None
    watch: Watch | None = None
    try:
        saving.rehearse(recipe.app_state)
        if settings.deterministic or request.check_against is not None:
            watch = make_watch(request, recipe, folder)
        candidates = on_rank_zero(lambda: resume_candidates(request, saving, folder))
        checkpoint_loading = recipe.checkpoint_loading
        if request.resume == "auto":
            checkpoint_loading = loading_whole(checkpoint_loading)
        if candidates:
            going_on = GoingOn(progress, settings, meaning, request.allow_changed, checkpoint_loading)
            checkpoint, progress, resume_state = resume_newest_(recipe.app_state, candidates, going_on)
            origin = RunOrigin.of(checkpoint, "fork" if request.fork and is_foreign(checkpoint, saving) else "resume")
        elif request.init_from is not None:
            weights = on_rank_zero(lambda: find_weights(as_location(request.init_from or ""), request.at_step))
            init_from_(recipe.app_state, weights, recipe.checkpoint_loading)
            origin = RunOrigin.of_weights(weights)
        saving.start = on_rank_zero(lambda: this_start(saving, folder, checkpoint, progress))
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
        raise CheckpointError(f"{error}\n{what_is_left(request, saving, folder)}") from error
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
