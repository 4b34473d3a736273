"""Numbers that follow from others."""

from __future__ import annotations

from pathlib import Path

import pytest

from modalities.exceptions import UserError
from modalities.testing.tiny import write_tokens
from modalities.training import number_conversion as numbers

CHECKPOINT = Path("checkpoints/eid_x-seen_steps_8-seen_tokens_4096-target_steps_24-target_tokens_12288")


def test_steps_samples_tokens_and_batches() -> None:
    assert numbers.num_samples_from_num_tokens(1000, 256) == 3
    assert numbers.local_num_batches_from_num_samples(2, 21, 4) == 2
    assert numbers.local_num_batches_from_num_tokens(2, 21 * 16 + 3, 16, 4) == 2
    assert numbers.num_steps_from_num_samples(2, 4, 35, 2) == 2
    assert numbers.num_steps_from_num_tokens(2, 4, 35 * 16, 16, 2) == 2
    assert numbers.num_tokens_from_num_steps(3, 2, 4, 16, 2) == 768


def test_progress_is_read_off_a_checkpoint_s_name() -> None:
    assert numbers.last_step_from_checkpoint_path(CHECKPOINT) == 7
    assert numbers.num_seen_steps_from_checkpoint_path(CHECKPOINT) == 8
    assert numbers.global_num_seen_tokens_from_checkpoint_path(CHECKPOINT) == 4096
    assert numbers.num_target_steps_from_checkpoint_path(CHECKPOINT) == 24
    assert numbers.global_num_target_tokens_from_checkpoint_path(CHECKPOINT) == 12288
    with pytest.raises(UserError, match="not named like a checkpoint"):
        numbers.last_step_from_checkpoint_path(Path("model.bin"))


def test_a_global_batch_is_shared_evenly_or_refused() -> None:
    assert numbers.local_micro_batch_size_from_global_batch_size(16, 2, 4) == 2
    with pytest.raises(UserError, match="16 samples per step cannot be shared evenly by 3 ranks x 1 micro-batches"):
        numbers.local_micro_batch_size_from_global_batch_size(16, 3, 1)


def test_tokens_of_a_packed_file_in_whole_steps(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "data.pbin", 16 * 11 + 1, 128)
    assert numbers.num_tokens_from_packed_mem_map_dataset_continuous(path, 16, 2, 2, 1, "x", True) == 2 * 64
