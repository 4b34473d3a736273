"""Going on from a checkpoint."""

from __future__ import annotations

import logging
from dataclasses import replace

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.discovery import Checkpoint, locate_checkpoint
from modalities.checkpointing.fsdp.fsdp_checkpoint_loading import DCPCheckpointLoading
from modalities.checkpointing.reading.load_planner import LoadingOptions
from modalities.checkpointing.restoring import restore_
from modalities.checkpointing.resume_state import ResumeState, own_rank_state, read_resume_state
from modalities.exceptions import DamagedCheckpoint
from modalities.parallel.process_group import global_rank, on_rank_zero
from modalities.progress import TrainingProgress
from modalities.training.recipe import Settings

logger = logging.getLogger(__name__)


def resume_(
    app_state: AppState,
    checkpoint: Checkpoint,
    progress: TrainingProgress,
    settings: Settings,
    checkpoint_loading: object = None,
) -> tuple[TrainingProgress, ResumeState | None]:
    """Load the checkpoint into the app state, in place.

    Args:
        app_state: As built.
        checkpoint: Where to go on from.
        progress: What the config says.
        settings: Of the run.
        checkpoint_loading: The config's own way of loading, if it has one.

    Returns:
        Where the run stands, with its present target; and the random states, to be set last.
    """
    resume_state = restore_(app_state, checkpoint, checkpoint_loading)
    if resume_state is not None:
        app_state.rank_state = own_rank_state(resume_state)
        seen = resume_state.progress
    else:
        tokens = checkpoint.progress.num_seen_tokens
        seen = replace(checkpoint.progress, num_seen_samples=tokens // settings.step_profile.sequence_length)
        logger.warning("%s has no resume state: random states (dropout) start anew", checkpoint.path)
    reached = replace(seen, num_target_steps=progress.num_target_steps, num_target_tokens=progress.num_target_tokens)
    return reached, resume_state


def resume_newest_(
    app_state: AppState,
    candidates: list[Checkpoint],
    progress: TrainingProgress,
    settings: Settings,
    checkpoint_loading: object = None,
) -> tuple[Checkpoint, TrainingProgress, ResumeState | None]:
    """Load the first checkpoint that is whole, in place; each one passed over is told with the reason.

    Args:
        app_state: As built.
        candidates: Best first; at least one.
        progress: What the config says.
        settings: Of the run.
        checkpoint_loading: The config's own way of loading, if it has one.

    Raises:
        DamagedCheckpoint: None is whole.
    """
    for index, checkpoint in enumerate(candidates):
        try:
            return checkpoint, *resume_(app_state, checkpoint, progress, settings, checkpoint_loading)
        except DamagedCheckpoint as error:
            if index == len(candidates) - 1:
                raise
            if global_rank() == 0:
                logger.warning("%s; going back to the one before it", error)
    raise AssertionError("there is at least one candidate")


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
