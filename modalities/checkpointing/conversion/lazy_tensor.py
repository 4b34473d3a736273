"""A tensor that is read when it is written: what every sink takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from modalities.checkpointing.reading.sources import Form
from modalities.exceptions import CheckpointError

_BLOCK_BYTES = 4 << 20
"""Cast and written at a time."""


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor of a checkpoint that is yet to be read.

    Args:
        key: For messages.
        form: As it is written.
        read: Gives it, on the CPU; of another floating-point type it is cast block by block on the way out.
        on_block: Told each block that is written, contiguous and of the form's type.
    """

    key: str
    form: Form
    read: Callable[[], Tensor]
    on_block: Callable[[Tensor], None] | None = None

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
        num_elements = max(1, _BLOCK_BYTES // max(flat.dtype.itemsize, dtype.itemsize))
        for start in range(0, flat.numel(), num_elements):
            block = _cast(flat[start : start + num_elements], dtype, self.key)
            if self.on_block is not None:
                self.on_block(block)
            yield block


def _cast(block: Tensor, dtype: torch.dtype, key: str) -> Tensor:
    if block.dtype == dtype:
        return block
    cast = block.to(dtype)
    if bool((block.isfinite() & ~cast.isfinite()).any()):
        name = str(dtype).removeprefix("torch.")
        largest = float(block[block.isfinite()].abs().max())
        raise CheckpointError(f"`{key}` holds {largest:g}, which is infinite in {name}; choose another --dtype")
    return cast
