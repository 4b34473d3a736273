"""From built components to a trainer: what fits together, and what the user is told first."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from modalities.data.dataloader import LLMDataLoader
from modalities.exceptions import UserError
from modalities.parallel.gradient_sync import is_sharded
from modalities.parallel.parameter_count import num_parameters
from modalities.parallel.precision import is_fast_in_bfloat16
from modalities.parallel.process_group import global_rank, world_size
from modalities.progress import TrainingProgress
from modalities.tracking.console import console
from modalities.tracking.subscribers import DummyProgressSubscriber, ResultsSubscriberIF
from modalities.training import rules
from modalities.training.gradient_clipping import measuring_only
from modalities.training.parting import Watch
from modalities.training.recipe import Settings, TrainingRecipe
from modalities.training.settings import Autocast
from modalities.training.trainer import Intervals, StepProfile, Trainer

logger = logging.getLogger(__name__)


def step_profile_of(settings: Settings) -> StepProfile:
    """The shape of a step, all numbers known."""
    profile = settings.step_profile
    return StepProfile(
        profile.gradient_accumulation_steps,
        profile.local_train_micro_batch_size,
        profile.sequence_length,
        profile.dp_degree,
    )


def start_progress(settings: Settings) -> TrainingProgress:
    """Where the config says that the run starts."""
    start, target = settings.training_progress, settings.training_target
    return TrainingProgress(
        start.num_seen_steps,
        start.global_num_seen_tokens,
        target.num_target_steps,
        target.num_target_tokens,
        # existing warm starts tell tokens and steps only
        start.num_seen_samples or start.global_num_seen_tokens // settings.step_profile.sequence_length,
    )


def check_consistency(recipe: TrainingRecipe) -> None:
    """Check what no single component can see.

    Raises:
        UserError: Model, data, batch and world do not fit together.
    """
    settings: Settings = recipe.settings
    profile = step_profile_of(settings)
    _check_world(recipe, profile)
    _check_tokens(recipe, profile)
    loader: LLMDataLoader = recipe.train_dataloader
    _refuse(rules.batch_is_micro_batch(loader.batch_size, profile.local_train_micro_batch_size))
    _refuse(rules.replicas_are_ranks(loader.num_replicas, profile.dp_degree))
    _check_names(recipe)
    for metric in recipe.checkpoint_saving.strategy.metrics:
        _refuse(rules.metric_is_measured(metric, [loader.dataloader_tag for loader in recipe.eval_dataloaders]))
    vocab_size = getattr(recipe.app_state.model_parts[0], "vocab_size", None)
    if vocab_size is None:
        return
    for dataset in [recipe.train_dataset, *(loader.dataset for loader in recipe.eval_dataloaders)]:
        check_ids = getattr(dataset, "require_token_ids_below", None)
        if check_ids is not None:
            check_ids(vocab_size)


def _refuse(message: str | None) -> None:
    if message is not None:
        raise UserError(message)


def _check_names(recipe: TrainingRecipe) -> None:
    parts = {
        "train_dataset": recipe.train_dataset,
        "train_dataloader.collate_fn": recipe.train_dataloader.collate_fn,
        "model_raw": recipe.app_state.model_parts[0],
        "loss_fn": recipe.loss_fn,
    }
    for key, giver, taker in rules.NAMES:
        given, taken = getattr(parts[giver], key, None), getattr(parts[taker], key, None)
        if given is not None and taken is not None:
            _refuse(rules.name_mismatch(key, giver, given, taker, taken))


def _check_world(recipe: TrainingRecipe, profile: StepProfile) -> None:
    if profile.dp_degree != world_size():
        raise UserError(
            f"settings.step_profile.dp_degree is {profile.dp_degree}, but {world_size()} ranks train on different data; "
            "take it from the device mesh by number_conversion: parallel_degree"
        )
    if world_size() > 1 and not all(is_sharded(part) for part in recipe.app_state.model_parts):
        raise UserError(
            f"the model is not sharded, so the {world_size()} ranks would train apart; "
            "wrap it with `model: fsdp2_wrapped` or `model: fsdp1_wrapped`"
        )


def _check_tokens(recipe: TrainingRecipe, profile: StepProfile) -> None:
    settings: Settings = recipe.settings
    progress = start_progress(settings)
    message = rules.tokens_per_step(
        progress.num_target_tokens,
        progress.num_target_steps,
        profile.gradient_accumulation_steps,
        profile.local_train_micro_batch_size,
        profile.sequence_length,
        profile.dp_degree,
        progress.num_seen_tokens,
        progress.num_seen_steps,
    )
    if message is not None:
        _enforce(settings.consistency_enforcement.enforce_tokens_per_step_consistency, message)
    num_available = len(recipe.train_dataset) * profile.sequence_length
    if num_available < progress.num_target_tokens:
        _enforce(
            settings.consistency_enforcement.enforce_enough_tokens_in_dataset,
            f"the training data has {num_available} tokens, fewer than the target of {progress.num_target_tokens}, "
            "so it will be seen more than once; change one of them, or set "
            "settings.consistency_enforcement.enforce_enough_tokens_in_dataset: false",
        )


def _enforce(is_error: bool, message: str) -> None:
    if is_error:
        raise UserError(message)
    if global_rank() == 0:
        logger.warning("%s", message)


def autocast_dtype(autocast: Autocast, device: torch.device) -> torch.dtype | None:
    """The precision that an autocast setting means on a device; None for none."""
    if autocast is Autocast.NONE or (autocast is Autocast.AUTO and not is_fast_in_bfloat16(device)):
        return None
    return torch.bfloat16


def make_trainer(
    recipe: TrainingRecipe,
    device: torch.device,
    results_subscribers: list[ResultsSubscriberIF],
    watch: Watch | None = None,
) -> Trainer:
    """Wire the built components.

    Args:
        recipe: Built components.
        device: This rank's device; unsharded models are moved to it.
        results_subscribers: Besides the recipe's own.
        watch: Looks at every logged step.
    """
    settings: Settings = recipe.settings
    for part in recipe.app_state.model_parts:
        if not is_sharded(part):
            part.to(device)
    own = [recipe.evaluation_subscriber] if recipe.evaluation_subscriber is not None else []
    intervals = settings.intervals
    return Trainer(
        app_state=recipe.app_state,
        loss_fn=recipe.loss_fn,
        gradient_clipper=recipe.gradient_clipper or measuring_only(recipe.app_state.model_parts),
        train_dataloader=recipe.train_dataloader,
        eval_dataloaders=recipe.eval_dataloaders,
        checkpoint_saving=recipe.checkpoint_saving,
        step_profile=step_profile_of(settings),
        intervals=Intervals(
            intervals.training_log_interval_in_steps,
            intervals.evaluation_interval_in_steps,
            intervals.checkpointing_interval_in_steps,
        ),
        device=device,
        autocast_dtype=autocast_dtype(settings.autocast, device),
        progress_subscriber=recipe.progress_subscriber or DummyProgressSubscriber(),
        results_subscribers=[*results_subscribers, *own],
        mfu_calculator=recipe.mfu_calculator,
        watch=watch,
    )


def print_banner(
    recipe: TrainingRecipe,
    device: torch.device,
    progress: TrainingProgress,
    origin: object,
    run_folder: Path,
) -> None:
    """Tell what is about to run."""
    profile = step_profile_of(recipe.settings)
    parameters = sum(num_parameters(part) for part in recipe.app_state.model_parts)
    start = "fresh" if progress.num_seen_steps == 0 else f"step {progress.num_seen_steps}"
    if origin is not None:
        start = f"step {progress.num_seen_steps}, {origin}"
    rows = {
        "device": f"{device.type} x {world_size()}"
        + (f", {torch.get_num_threads()} threads each" * (device.type == "cpu")),
        "world size": f"{world_size()}",
        "parameters": f"{parameters:,}",
        "tokens per step": f"{profile.num_tokens:,} ({profile.num_samples} sequences of {profile.sequence_length})",
        "steps": f"{progress.num_target_steps:,} ({progress.num_target_tokens:,} tokens)",
        "training data": f"{len(recipe.train_dataset) * profile.sequence_length:,} tokens",
        "start": start,
        "run folder": str(run_folder),
    }
    for name, value in rows.items():
        console.print(f"{name:<16} {value}", markup=False)
