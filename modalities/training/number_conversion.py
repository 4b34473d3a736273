"""Numbers of a config that follow from others: steps from tokens, tokens from steps, progress from a checkpoint's name.

Steps are optimizer steps; tokens and samples are global, over all ranks.
"""

from __future__ import annotations

from pathlib import Path

from modalities.checkpointing.paths import parse_checkpoint_name
from modalities.data.packed_dataset import PackedMemMapDatasetContinuous
from modalities.data.raw_index import read_raw_index
from modalities.exceptions import UserError
from modalities.progress import TrainingProgress


def local_num_batches_from_num_samples(num_ranks: int, global_num_samples: int, local_micro_batch_size: int) -> int:
    """Whole micro-batches that each rank gets."""
    return global_num_samples // num_ranks // local_micro_batch_size


def local_num_batches_from_num_tokens(
    num_ranks: int, global_num_tokens: int, sequence_length: int, local_micro_batch_size: int
) -> int:
    """Whole micro-batches that each rank gets."""
    num_samples = num_samples_from_num_tokens(global_num_tokens, sequence_length)
    return local_num_batches_from_num_samples(num_ranks, num_samples, local_micro_batch_size)


def num_samples_from_num_tokens(num_tokens: int, sequence_length: int) -> int:
    """Whole sequences in a number of tokens."""
    return num_tokens // sequence_length


def num_steps_from_num_samples(
    num_ranks: int, local_micro_batch_size: int, global_num_samples: int, gradient_accumulation_steps: int
) -> int:
    """Whole steps in a number of samples."""
    return global_num_samples // num_ranks // local_micro_batch_size // gradient_accumulation_steps


def num_steps_from_num_tokens(
    dp_degree: int,
    local_micro_batch_size: int,
    global_num_tokens: int,
    sequence_length: int,
    gradient_accumulation_steps: int,
) -> int:
    """Whole steps in a number of tokens."""
    num_samples = num_samples_from_num_tokens(global_num_tokens, sequence_length)
    return num_steps_from_num_samples(dp_degree, local_micro_batch_size, num_samples, gradient_accumulation_steps)


def num_tokens_from_num_steps(
    num_steps: int,
    dp_degree: int,
    local_micro_batch_size: int,
    sequence_length: int,
    gradient_accumulation_steps: int,
) -> int:
    """Tokens that a number of steps takes."""
    return num_steps * dp_degree * local_micro_batch_size * sequence_length * gradient_accumulation_steps


def local_micro_batch_size_from_global_batch_size(
    global_num_samples_per_step: int, dp_degree: int, gradient_accumulation_steps: int
) -> int:
    """Samples per rank and micro-batch that make the same global batch in any world.

    Raises:
        UserError: The ranks and micro-batches do not divide the global batch.
    """
    num_shares = dp_degree * gradient_accumulation_steps
    if global_num_samples_per_step % num_shares:
        raise UserError(
            f"{global_num_samples_per_step} samples per step cannot be shared evenly by {dp_degree} ranks x "
            f"{gradient_accumulation_steps} micro-batches; use a multiple of {num_shares}, or another number of ranks"
        )
    return global_num_samples_per_step // num_shares


def last_step_from_checkpoint_path(checkpoint_path: Path) -> int:
    """Index of the last step done, counted from 0."""
    return _progress(checkpoint_path).num_seen_steps - 1


def num_seen_steps_from_checkpoint_path(checkpoint_path: Path) -> int:
    """Steps done."""
    return _progress(checkpoint_path).num_seen_steps


def global_num_seen_tokens_from_checkpoint_path(checkpoint_path: Path) -> int:
    """Tokens seen."""
    return _progress(checkpoint_path).num_seen_tokens


def num_target_steps_from_checkpoint_path(checkpoint_path: Path) -> int:
    """Steps that the run aimed at."""
    return _progress(checkpoint_path).num_target_steps


def global_num_target_tokens_from_checkpoint_path(checkpoint_path: Path) -> int:
    """Tokens that the run aimed at."""
    return _progress(checkpoint_path).num_target_tokens


def num_tokens_from_packed_mem_map_dataset_continuous(
    dataset_path: Path,
    sequence_length: int,
    dp_degree: int,
    local_micro_batch_size: int,
    gradient_accumulation_steps: int,
    sample_key: str,
    reuse_last_target: bool,
) -> int:
    """Tokens of one pass over a packed file, in whole steps."""
    dataset = PackedMemMapDatasetContinuous(dataset_path, sequence_length, sample_key, reuse_last_target)
    num_steps = num_steps_from_num_samples(dp_degree, local_micro_batch_size, len(dataset), gradient_accumulation_steps)
    return num_tokens_from_num_steps(
        num_steps, dp_degree, local_micro_batch_size, sequence_length, gradient_accumulation_steps
    )


def num_steps_from_raw_dataset_index(
    raw_index_path: Path, num_ranks: int, local_micro_batch_size: int, gradient_accumulation_steps: int
) -> int:
    """Whole steps in one pass over a raw dataset, one sample per document."""
    num_samples = len(read_raw_index(raw_index_path))
    return num_steps_from_num_samples(num_ranks, local_micro_batch_size, num_samples, gradient_accumulation_steps)


def _progress(checkpoint_path: Path) -> TrainingProgress:
    parsed = parse_checkpoint_name(checkpoint_path)
    if parsed is None:
        raise UserError(f"{checkpoint_path.name} is not named like a checkpoint, so its progress cannot be read off it")
    return parsed[2]
