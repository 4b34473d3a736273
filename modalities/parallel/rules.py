"""What must hold between the degrees of parallelism. Free of torch: checked from the config."""

from __future__ import annotations

import math


def mesh_fits_world(world_size: int, shard: int, replicate: int | None, *others: int | None) -> str | None:
    """The degrees of all axes multiply to the number of ranks; one data-parallel degree may be -1, which fills it up."""
    degrees = [shard, 1 if replicate is None else replicate, *(1 if degree is None else degree for degree in others)]
    if any(degree == 0 or degree < -1 for degree in degrees):
        return "a degree is the number of ranks along an axis: at least 1, or -1 to fill up the world"
    fixed = math.prod(degree for degree in degrees if degree != -1)
    shown = " x ".join(str(degree) for degree in degrees if degree != 1) or "1"
    if degrees.count(-1) > 1:
        return "two data-parallel degrees are -1, so neither is known: give one of them"
    if -1 in degrees and world_size % fixed == 0:
        return None
    if fixed == world_size:
        return None
    return (
        f"the degrees {shown} do not fit a world of {world_size} process{'es' * (world_size > 1)}; change them, or "
        f"start (or check) with --nproc or --world-size {fixed}"
    )
