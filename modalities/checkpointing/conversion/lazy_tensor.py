"""A tensor that is read when it is written: what every sink takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor

from modalities.checkpointing.reading.sources import Form
from modalities.checkpointing.saving.frames import payload_of
from modalities.exceptions import CheckpointError

_BLOCK_BYTES = 4 << 20
"""Cast and written at a time."""


@dataclass
class Tally:
    """What became of the tensors that were read.

    Args:
        on_bytes: Told how many bytes more were read, as they are written.
        digests: xxh3-128 of the elements of each as it was written, by key; not of those without elements.
    """

    on_bytes: Callable[[int], None]
    digests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor of a checkpoint that is yet to be read.

    Args:
        key: For messages and the tally.
        form: As it is written.
        read: Gives it, on the CPU; of another floating-point type it is cast block by block on the way out.
        tally: Told of what is read.
    """

    key: str
    form: Form
    read: Callable[[], Tensor]
    tally: Tally | None = None

    def blocks(self) -> Iterator[Tensor]:
        """All elements, flat, one block after the other; only one tensor at a time is in memory.

        Raises:
            CheckpointError: A finite number is infinite in the form's type.
        """
        tensor, dtype = self.read().detach(), self.form.torch_dtype
        if tuple(tensor.shape) != self.form.shape:
            raise CheckpointError(f"`{self.key}` has the shape {list(tensor.shape)}, not {list(self.form.shape)}")
        flat = tensor.contiguous().reshape(-1)
        del tensor
        digest = xxhash.xxh3_128()
        num_elements = max(1, _BLOCK_BYTES // max(flat.dtype.itemsize, dtype.itemsize))
        for start in range(0, flat.numel(), num_elements):
            block = _cast(flat[start : start + num_elements], dtype, self.key)
            if self.tally is not None:
                digest.update(payload_of(block))
                self.tally.on_bytes(block.nbytes)
            yield block
        if self.tally is not None:
            self.tally.digests[self.key] = digest.hexdigest()


def digest_of(tensor: Tensor) -> str:
    """xxh3-128 of a tensor's elements, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(payload_of(tensor.detach().contiguous()))


def _cast(block: Tensor, dtype: torch.dtype, key: str) -> Tensor:
    if block.dtype == dtype:
        return block
    cast = block.to(dtype)
    # float8 knows no isfinite, but every other type here has room for it
    may_overflow = torch.finfo(block.dtype).max > torch.finfo(dtype).max
    if may_overflow and bool((block.isfinite() & ~cast.isfinite()).any()):
        name = str(dtype).removeprefix("torch.")
        largest = float(block[block.isfinite()].abs().max())
        raise CheckpointError(f"`{key}` holds {largest:g}, which is infinite in {name}; choose another --dtype")
    return cast
