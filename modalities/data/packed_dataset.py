"""Training samples from packed token files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from modalities.data.fingerprint import fingerprint_of
from modalities.data.packed_file import open_tokens, read_info
from modalities.data.packing import Packing
from modalities.exceptions import DataError

_FULL_SCAN_LIMIT = 256 * 2**20
"""Tokens up to which every id is looked at before training starts, which takes well under a second."""


class PackedMemMapDatasetContinuous(Dataset[dict[str, NDArray[np.int64]]]):
    """Blocks of consecutive tokens, across document borders.

    Args:
        raw_data_path: The packed file.
        sequence_length: Tokens S that a model sees per sample; a sample has S + 1.
        sample_key: Name of the token ids in a sample.
        reuse_last_target: Whether a block's last token is the next block's first, so that every token is a target once.
        pack_from: Makes the file first if it is not there or was made of another text or tokenizer.

    Raises:
        DataError: The file is absent, damaged, or too short for one block.
    """

    def __init__(
        self,
        raw_data_path: Path,
        sequence_length: int,
        sample_key: str,
        reuse_last_target: bool = True,
        pack_from: Packing | None = None,
    ) -> None:
        if pack_from is not None:
            pack_from.ensure(raw_data_path)
        self.path, self.sample_key = raw_data_path, sample_key
        self._block_size = sequence_length + 1
        self._stride = sequence_length if reuse_last_target else sequence_length + 1
        self._tokens = open_tokens(raw_data_path)
        self._id_limit: int | None = None
        if len(self) == 0:
            raise DataError(
                f"{raw_data_path} has {self.num_tokens} tokens, fewer than one sample of {self._block_size}; "
                "lower the sequence length or pack more text"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of the file."""
        return len(self._tokens)

    def fingerprint(self) -> dict[str, int | str]:
        """What tells the data apart from other data."""
        return fingerprint_of(self.path)

    def __len__(self) -> int:
        return max(0, (self.num_tokens - self._block_size) // self._stride + 1)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self._stride
        block = self._tokens[start : start + self._block_size].astype(np.int64)
        if self._id_limit is not None:
            self._refuse(int(block.max()), self._id_limit)
        return {self.sample_key: block}

    def __getstate__(self) -> dict[str, Any]:
        # a worker process maps the file itself instead of getting a copy of it
        return {**self.__dict__, "_tokens": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokens = open_tokens(self.path)

    def require_token_ids_below(self, vocab_size: int) -> None:
        """Check that a model of that vocabulary can read the file; of a very large one, each sample is checked later.

        Raises:
            DataError: An id is beyond the vocabulary.
        """
        if vocab_size > np.iinfo(self._tokens.dtype).max:
            return
        info = read_info(self.path)
        if info is not None and info.num_tokens == self.num_tokens:
            self._refuse(info.max_token_id, vocab_size)
        elif self.num_tokens <= _FULL_SCAN_LIMIT:
            self._refuse(int(self._tokens.max()), vocab_size)
        else:
            self._id_limit = vocab_size

    def _refuse(self, largest_id: int, vocab_size: int) -> None:
        if largest_id >= vocab_size:
            raise DataError(
                f"{self.path} holds the token id {largest_id}, but the model's vocabulary has {vocab_size} ids; "
                "was it packed with another tokenizer? Set the model's vocab_size to the tokenizer's, or pack it again"
            )
