"""Going on from a checkpoint."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.discovery import Checkpoint, locate_checkpoint
from modalities.checkpointing.fsdp.fsdp_checkpoint_loading import DCPCheckpointLoading
from modalities.checkpointing.initial_weights import load_weights_, require_equal_ties
from modalities.checkpointing.manifest import read_manifest
from modalities.checkpointing.reading.load_planner import LoadingOptions
from modalities.checkpointing.restoring import restore_
from modalities.checkpointing.resume_state import ResumeState, own_rank_state, read_resume_state
from modalities.exceptions import CheckpointError, DamagedCheckpoint
from modalities.models.rotary import follow_configured_bases_
from modalities.optim.schedulers import advance_
from modalities.parallel.process_group import global_rank, on_rank_zero
from modalities.progress import TrainingProgress
from modalities.training.assembly import step_profile_of
from modalities.training.changes import Change, changes_between, require_allowed, table_of
from modalities.training.meaning import Meaning
from modalities.training.recipe import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GoingOn:
    """How a run goes on from a checkpoint.

    Args:
        progress: What the config says; its target counts.
        settings: Of the run.
        meaning: Of the run's config.
        allowed: Words of ``--allow-changed``.
        checkpoint_loading: The config's own way of loading, if it has one.
    """

    progress: TrainingProgress
    settings: Settings
    meaning: Meaning
    allowed: Sequence[str] = ()
    checkpoint_loading: object = None

    @property
    def takes_a_part(self) -> bool:
        """Whether the user asked for a part of the checkpoint, which may well be of another run."""
        loading = self.checkpoint_loading
        return isinstance(loading, DCPCheckpointLoading) and (
            not loading.options.strict or loading.options.include is not None or bool(loading.options.exclude)
        )


def resume_(
    app_state: AppState, checkpoint: Checkpoint, going_on: GoingOn
) -> tuple[TrainingProgress, ResumeState | None]:
    """Load the checkpoint into the app state, in place.

    Args:
        app_state: As built.
        checkpoint: Where to go on from.
        going_on: How.

    Returns:
        Where the run stands, with its present target; and the random states, to be set last.

    Raises:
        UserError: The config has changed in what must be allowed first; nothing is loaded.
    """
    changes = on_rank_zero(lambda: _changes_since(checkpoint, going_on))
    built = _Hyperparameters(app_state)
    if going_on.takes_a_part:
        require_equal_ties(app_state, checkpoint.path)
    resume_state = restore_(app_state, checkpoint, going_on.checkpoint_loading)
    _follow_config_(app_state)
    if any(change.is_hyperparameter for change in changes):
        built.take_over_(app_state)
    if resume_state is not None:
        app_state.rank_state = own_rank_state(resume_state)
        seen = resume_state.progress
    else:
        tokens = checkpoint.progress.num_seen_tokens
        sequence_length = going_on.settings.step_profile.sequence_length
        seen = replace(checkpoint.progress, num_seen_samples=tokens // sequence_length)
        logger.warning("%s has no resume state: random states (dropout) start anew", checkpoint.path)
    return _with_target(seen, going_on), resume_state


def resume_newest_(
    app_state: AppState, candidates: list[Checkpoint], going_on: GoingOn
) -> tuple[Checkpoint, TrainingProgress, ResumeState | None]:
    """Load the first checkpoint that is whole, in place; each one passed over is told with the reason.

    Args:
        app_state: As built.
        candidates: Best first; at least one.
        going_on: How.

    Raises:
        DamagedCheckpoint: None is whole.
        UserError: The config has changed in what must be allowed first.
    """
    for index, checkpoint in enumerate(candidates):
        try:
            return checkpoint, *resume_(app_state, checkpoint, going_on)
        except DamagedCheckpoint as error:
            if index == len(candidates) - 1:
                raise
            if global_rank() == 0:
                logger.warning("%s; going back to the one before it", error)
    raise AssertionError("there is at least one candidate")


def _changes_since(checkpoint: Checkpoint, going_on: GoingOn) -> list[Change]:
    """What has changed since a checkpoint, once it is told or allowed."""
    try:
        manifest = read_manifest(checkpoint.manifest_path)
    except CheckpointError:
        return []  # loading tells, or was asked not to look
    if manifest is None or not manifest.config:
        return []
    changes = changes_between(Meaning(manifest.config), going_on.meaning)
    if not going_on.takes_a_part:
        require_allowed(changes, going_on.allowed, checkpoint.path.name, going_on.meaning)
    if changes:
        step = manifest.progress.num_seen_steps
        logger.info("changed since the checkpoint of step %d:\n%s", step, table_of(changes))
    return changes


def _with_target(seen: TrainingProgress, going_on: GoingOn) -> TrainingProgress:
    """Where a run stands, with the target of the config.

    Where steps have had different numbers of tokens, the tokens of the target are kept, and its steps follow.
    """
    target = going_on.progress
    num_steps = target.num_target_steps
    num_tokens_per_step = step_profile_of(going_on.settings).num_tokens
    is_mixed = seen.num_seen_tokens != seen.num_seen_steps * num_tokens_per_step
    if is_mixed and going_on.settings.consistency_enforcement.enforce_tokens_per_step_consistency:
        num_left = max(0, -(-(target.num_target_tokens - seen.num_seen_tokens) // num_tokens_per_step))
        num_steps = seen.num_seen_steps + num_left
        if num_steps != target.num_target_steps and global_rank() == 0:
            logger.info(
                "a step has another number of tokens now (%d): %d more steps, instead of to step %d, make the %d tokens "
                "of the target",
                num_tokens_per_step,
                num_left,
                target.num_target_steps,
                target.num_target_tokens,
            )
    return replace(seen, num_target_steps=num_steps, num_target_tokens=target.num_target_tokens)


class _Hyperparameters:
    """What optimizer and schedule were built with, before a checkpoint overwrites it.

    Args:
        app_state: As built.
    """

    def __init__(self, app_state: AppState) -> None:
        self._groups = [_without_parameters(group) for group in app_state.optimizer.param_groups]
        scheduler = app_state.lr_scheduler
        self._scheduler_state = copy.deepcopy(scheduler.state_dict()) if scheduler is not None else None

    def take_over_(self, app_state: AppState) -> None:
        """Set them again, as if they had been so from the first step; moments stay as they were loaded."""
        for group, built in zip(app_state.optimizer.param_groups, self._groups, strict=True):
            group.update(copy.deepcopy(built))
        scheduler = app_state.lr_scheduler
        if scheduler is None or self._scheduler_state is None:
            return
        num_steps = scheduler.last_epoch
        scheduler.load_state_dict(self._scheduler_state)
        advance_(scheduler, num_steps)


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in group.items() if key != "params"})


def init_from_(app_state: AppState, location: Path, checkpoint_loading: object = None) -> None:
    """Take the weights of a checkpoint, in place; optimizer, schedule and counters stay as built.

    Args:
        app_state: As built.
        location: A checkpoint of any kind.
        checkpoint_loading: The config's own way of loading, if it has one.
    """
    is_dcp = isinstance(checkpoint_loading, DCPCheckpointLoading)
    load_weights_(app_state, location, checkpoint_loading.options if is_dcp else LoadingOptions())
    _follow_config_(app_state)


def _follow_config_(app_state: AppState) -> None:
    """What is stored with the weights but is the config's to tell."""
    bases = {base for part in app_state.model_parts for base in follow_configured_bases_(part)}
    if bases and global_rank() == 0:
        told = ", ".join(map(str, sorted(bases)))
        logger.warning("the checkpoint has rotary frequencies of another base_freq; the config's %s is used", told)


def loading_whole(checkpoint_loading: object) -> object:
    """How the run's own checkpoints are read: whole, also where the run began from a part of another's."""
    if not isinstance(checkpoint_loading, DCPCheckpointLoading):
        return checkpoint_loading
    whole = DCPCheckpointLoading(checkpoint_loading.global_rank)
    whole.options = LoadingOptions(verify=checkpoint_loading.options.verify)
    return whole


def warmstart_state(settings: Settings) -> ResumeState | None:
    """Random states of the checkpoint that the config itself loads, if it names one."""
    paths = settings.warmstart_checkpoint_paths
    if paths is None:
        return None
    path = paths.checkpoint_folder_path or paths.model_checkpoint_path
    if path is None:
        return None
    return on_rank_zero(lambda: read_resume_state(locate_checkpoint(path).resume_state_path))
