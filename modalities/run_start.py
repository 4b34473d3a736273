"""How a run begins: under which name, from which checkpoint, as which of its starts, and held against what."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from modalities.checkpointing.discovery import Checkpoint, checkpoints_in
from modalities.checkpointing.history import history_of, next_start, starts_of
from modalities.checkpointing.manifest import Manifest, Start, read_manifest
from modalities.checkpointing.storage import as_location
from modalities.exceptions import CheckpointError, UserError
from modalities.progress import TrainingProgress
from modalities.run_folder import RunFolder, checkpoints_of_run, find_checkpoint, new_experiment_id, newest_run_of
from modalities.run_request import RunRequest, resume_command
from modalities.training.changes import DATA
from modalities.training.meaning import Meaning
from modalities.training.recipe import TrainingRecipe

if TYPE_CHECKING:
    from modalities.checkpointing.checkpoint_saving import CheckpointSaving
    from modalities.training.parting import Watch

logger = logging.getLogger(__name__)

_EXPERIMENT_ID = re.compile(r"\w[\w .+@=-]*")


def choose_experiment_id(request: RunRequest) -> str:
    """The name of the run's folder: given, that of the run which goes on, or a new one.

    Raises:
        UserError: The given one cannot name a folder, or there is nothing to go on with.
    """
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


def resume_candidates(request: RunRequest, saving: CheckpointSaving, folder: RunFolder) -> list[Checkpoint]:
    """Checkpoints that the run may go on from, best first.

    Raises:
        UserError: It has some, and was not asked to go on; or what was asked for is not there.
    """
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


def is_foreign(checkpoint: Checkpoint, saving: CheckpointSaving) -> bool:
    """Whether another run wrote a checkpoint."""
    return (checkpoint.path.parent, checkpoint.experiment_id) != (saving.checkpoint_path, saving.experiment_id)


def with_content(meaning: Meaning, dataset: object) -> Meaning:
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


def this_start(
    saving: CheckpointSaving, folder: RunFolder, origin: Checkpoint | None, progress: TrainingProgress
) -> Start:
    """Number and origin of the present start among those of the run."""
    own = checkpoints_in(saving.checkpoint_path, saving.experiment_id)
    known = [*folder.starts(), *starts_of(own).values()]
    return next_start(known, _manifest_of(origin) if origin is not None else None, progress.num_seen_steps)


def what_is_left(request: RunRequest, saving: CheckpointSaving, folder: RunFolder) -> str:
    """After a save that failed: the checkpoint before it, and how to go on from there."""
    own = checkpoints_in(saving.checkpoint_path, saving.experiment_id)
    there = history_of(starts_of(own), folder.starts()).current
    if not there:
        return f"there is no checkpoint before it in {saving.checkpoint_path}"
    return (
        f"the one before it is {there[0].path.name}; when the cause is removed, go on from there with\n"
        f"  {resume_command(request, folder.path)}"
    )


def make_watch(request: RunRequest, recipe: TrainingRecipe, folder: RunFolder) -> Watch:
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
