from pathlib import Path

import pytest

from tests.end_to_end.soak import soak


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_a_run_that_is_killed_again_and_again_ends_like_one_that_never_was(tmp_path: Path, wrapper: str) -> None:
    soaked = soak(tmp_path, 5, seed=1, wrapper=wrapper)
    assert sum(soaked.num_kills_by_rank.values()) == 5
