"""What exact resuming needs beyond model, optimizer and scheduler: random states, counters, the data position.

It lies in one small file beside the data of a checkpoint, which a stock reader ignores, and holds only tensors and
plain values, so that ``torch.load(weights_only=True)`` reads it.
"""

from __future__ import annotations

import io
import logging
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from modalities.exceptions import CheckpointError, DamagedCheckpoint
from modalities.parallel.process_group import global_rank, machine_device, world_size
from modalities.progress import TrainingProgress

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
OWED_EVALUATIONS = "owed_evaluations"
"""Of the further numbers, the same on all ranks: evaluations that were due when the run was stopped."""


@dataclass(frozen=True)
class ResumeState:
    """Content of the file.

    Args:
        progress: Counters at the time of saving; its samples are the position in the data.
        rng: State of every random generator, by rank.
        rank_state: Further numbers, by rank.
        lr_scheduler: The scheduler's state where the checkpoint's format has no place for it.
    """

    progress: TrainingProgress
    rng: list[dict[str, Any]]
    rank_state: list[dict[str, float]]
    lr_scheduler: dict[str, Any] | None = None


RankPart = tuple[dict[str, Any], dict[str, float]]
"""A rank's random states and further numbers."""


def rank_part(rank_state: dict[str, float]) -> RankPart:
    """This rank's part of a resume state, as of now."""
    return rng_state(), dict(rank_state)


def resume_state_of(
    progress: TrainingProgress, parts: Sequence[RankPart], lr_scheduler: dict[str, Any] | None = None
) -> ResumeState:
    """The state of all ranks.

    Args:
        progress: Where the run stands.
        parts: By rank.
        lr_scheduler: The scheduler's state, if the checkpoint's format has no place for it.
    """
    return ResumeState(progress, [rng for rng, _ in parts], [numbers for _, numbers in parts], lr_scheduler)


def collect_resume_state(
    progress: TrainingProgress, rank_state: dict[str, float], lr_scheduler: dict[str, Any] | None = None
) -> ResumeState:
    """The state of all ranks, whole on rank 0; all ranks must call it."""
    own = rank_part(rank_state)
    gathered: list[Any] = [own]
    if world_size() > 1:
        gathered = [None] * world_size() if global_rank() == 0 else []
        dist.gather_object(own, gathered if global_rank() == 0 else None, dst=0)
    return resume_state_of(progress, gathered, lr_scheduler)


def resume_state_bytes(state: ResumeState) -> bytes:
    """The file's content."""
    content = {
        "format_version": FORMAT_VERSION,
        "progress": asdict(state.progress),
        "rng": state.rng,
        "rank_state": state.rank_state,
        "lr_scheduler": state.lr_scheduler,
    }
    sink = io.BytesIO()
    torch.save(content, sink)
    return sink.getvalue()


def read_resume_state(path: Path) -> ResumeState | None:
    """Read the file; None if there is none, as in a checkpoint from elsewhere.

    Raises:
        CheckpointError: The file is damaged, or written by a newer version.
    """
    if not path.is_file():
        return None
    try:
        content = torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
        version = content["format_version"]
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format {version}, this version reads up to {FORMAT_VERSION}: update modalities"
            )
        progress = TrainingProgress(**content["progress"])
        return ResumeState(progress, content["rng"], content["rank_state"], content["lr_scheduler"])
    except CheckpointError:
        raise
    except Exception as error:
        raise DamagedCheckpoint(
            f"{path} is damaged ({type(error).__name__}); resume from an earlier checkpoint"
        ) from error


def rng_state() -> dict[str, Any]:
    """State of torch's (CPU and accelerator), numpy's and Python's global generators."""
    version, internal, gauss_next = random.getstate()
    algorithm, keys, position, has_gauss, cached_gaussian = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        "python": (version, list(internal), gauss_next),
        "numpy": (algorithm, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached_gaussian),
    }
    device = machine_device()
    if device.type != "cpu":
        state["accelerator"] = torch.get_device_module(device).get_rng_state(device)
    return state


def seed_generators(seed: int) -> None:
    """Seed torch's, numpy's and Python's global generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def restore_rng_state(state: ResumeState) -> None:
    """Set this rank's generators to where they were; done last before training goes on.

    In another world than the one that saved, a rank's generators are seeded from rank 0's state and its own number.
    """
    rank = global_rank()
    if len(state.rng) != world_size():
        seed = int(state.rng[0]["torch"].to(torch.int64).sum()) + rank
        seed_generators(seed)
        if rank == 0:
            logger.warning(
                "saved by %d ranks, resumed by %d: random states (dropout) are drawn anew from the checkpoint's",
                len(state.rng),
                world_size(),
            )
        return
    own = state.rng[rank]
    torch.set_rng_state(own["torch"])
    version, internal, gauss_next = own["python"]
    random.setstate((version, tuple(internal), gauss_next))
    algorithm, keys, position, has_gauss, cached_gaussian = own["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), position, has_gauss, cached_gaussian))
    device = machine_device()
    if device.type != "cpu" and "accelerator" in own:
        torch.get_device_module(device).set_rng_state(own["accelerator"], device)


def own_rank_state(state: ResumeState) -> dict[str, float]:
    """This rank's further numbers; in another world than the one that saved, those that are the same on all ranks."""
    if len(state.rank_state) == world_size():
        return state.rank_state[global_rank()]
    return {key: state.rank_state[0][key] for key in (OWED_EVALUATIONS,) if key in state.rank_state[0]}
