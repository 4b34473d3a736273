"""Orders of samples: random access to the place of each, whatever there is of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from modalities.data.settings import ShuffleMethod

_MASK = 2**64 - 1
_NUM_ROUNDS = 6


def shuffled(num_samples: int, seed: int, method: ShuffleMethod) -> Sequence[int]:
    """A random order of 0 to ``num_samples`` - 1.

    Args:
        num_samples: How many.
        seed: The same seed gives the same order, on every machine.
        method: ``randperm`` draws all of it, 8 bytes a sample; ``feistel`` computes what is asked for.
    """
    if method is ShuffleMethod.FEISTEL:
        return FeistelPermutation(num_samples, seed)
    generator = torch.Generator().manual_seed(seed)
    order: Sequence[int] = torch.randperm(num_samples, generator=generator).numpy()  # type: ignore[assignment]
    return order


class FeistelPermutation(Sequence[int]):
    """A pseudorandom permutation that is computed, not stored: any place in constant time and no memory.

    A balanced Feistel network (Luby and Rackoff, 1988) over the next power of four; what falls outside is sent through
    again until it falls inside, fewer than four times on average. The round function is the finalizer of SplitMix64
    (Steele et al., 2014).

    Args:
        num_samples: Length N of the permutation.
        seed: Of the round keys.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples = num_samples
        self._half_bits = max(1, (max(num_samples - 1, 1).bit_length() + 1) // 2)
        self._keys = [_mixed(_mixed(seed & _MASK) + index) for index in range(_NUM_ROUNDS)]

    def __len__(self) -> int:
        return self._num_samples

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [self._at(place) for place in range(*index.indices(self._num_samples))]
        if not 0 <= index < self._num_samples:
            raise IndexError(f"place {index} of {self._num_samples}")
        return self._at(index)

    def _at(self, place: int) -> int:
        mask = (1 << self._half_bits) - 1
        while True:
            left, right = place >> self._half_bits, place & mask
            for key in self._keys:
                left, right = right, left ^ (_mixed(right ^ key) & mask)
            place = left << self._half_bits | right
            if place < self._num_samples:
                return place


def _mixed(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
