"""Names of checkpoints: written in one place, read in one place."""

from __future__ import annotations

import re
from pathlib import Path

from modalities.progress import TrainingProgress

CHECKPOINT_FOLDER_STRUCTURE = (
    "eid_{experiment_id}-seen_steps_{num_seen_steps}-seen_tokens_{num_seen_tokens}"
    "-target_steps_{num_target_steps}-target_tokens_{num_target_tokens}"
)
CHECKPOINT_STRUCTURE = (
    "eid_{experiment_id}-{entity}-seen_steps_{num_seen_steps}-seen_tokens_{num_seen_tokens}"
    "-target_steps_{num_target_steps}-target_tokens_{num_target_tokens}.bin"
)
LAST_CHECKPOINT_INFO = "last_checkpoint_info.json"
RESUME_STATE_FILE = "resume_state.pt"
RESUME_STATE_ENTITY = "resume_state"
MANIFEST_ENTITY = "manifest"
ENTITIES_OF_FSDP1 = ("optimizer", RESUME_STATE_ENTITY, MANIFEST_ENTITY, "model")
"""Files of an FSDP1 checkpoint in the order in which they get their names, and go in reverse: the model's decides."""

_NAME = re.compile(
    r"^eid_(?P<experiment_id>.+?)(?:-(?P<entity>model|optimizer|resume_state|manifest)(?=.*\.(?:bin|json)$))?"
    r"-seen_steps_(?P<num_seen_steps>\d+)-seen_tokens_(?P<num_seen_tokens>\d+)"
    r"-target_steps_(?P<num_target_steps>\d+)-target_tokens_(?P<num_target_tokens>\d+)(?:\.bin|\.json)?$"
)


def checkpoint_name(experiment_id: str, progress: TrainingProgress, entity: str | None = None) -> str:
    """Name of a DCP folder, or of an FSDP1 file of an entity (``model``, ``optimizer``, …)."""
    structure = CHECKPOINT_FOLDER_STRUCTURE if entity is None else CHECKPOINT_STRUCTURE
    if entity == MANIFEST_ENTITY:
        structure = structure.removesuffix(".bin") + ".json"
    return structure.format(
        experiment_id=experiment_id,
        entity=entity,
        num_seen_steps=progress.num_seen_steps,
        num_seen_tokens=progress.num_seen_tokens,
        num_target_steps=progress.num_target_steps,
        num_target_tokens=progress.num_target_tokens,
    )


def parse_checkpoint_name(path: Path) -> tuple[str, str | None, TrainingProgress] | None:
    """Experiment ID, entity and progress told by a checkpoint's name, or None if it is no such name.

    Samples are not part of the name; they are 0 here.
    """
    match = _NAME.match(path.name)
    if match is None:
        return None
    progress = TrainingProgress(
        int(match["num_seen_steps"]),
        int(match["num_seen_tokens"]),
        int(match["num_target_steps"]),
        int(match["num_target_tokens"]),
    )
    return match["experiment_id"], match["entity"], progress
