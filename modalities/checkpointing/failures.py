"""What went wrong on which rank, in one line."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException


def causes_of(error: CheckpointException) -> str:
    """The causes that a failed save or load gathered, by rank; an error without words is called by its name."""
    causes = {rank: wrapped[0] for rank, wrapped in sorted(error.failures.items())}
    return "; ".join(f"rank {rank}: {cause if str(cause) else type(cause).__name__}" for rank, cause in causes.items())
