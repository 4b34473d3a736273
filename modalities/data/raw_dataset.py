"""Samples from JSONL text, tokenized when they are asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from modalities.data.fingerprint import fingerprint_of
from modalities.data.packing import text_extractor
from modalities.data.raw_index import default_index_path, read_raw_index
from modalities.data.tokenizers import TokenizerWrapper
from modalities.exceptions import DataError


class MemMapDataset(Dataset[dict[str, NDArray[np.int64]]]):
    """One sample per document.

    Args:
        raw_data_path: The JSONL file.
        tokenizer: Text to ids.
        sample_key: Name of the token ids in a sample.
        index_path: Index of the file; default: its name with suffix ``.idx``.
        jq_pattern: What of a document is its text.

    Raises:
        DataError: The file or its index is absent.
    """

    def __init__(
        self,
        raw_data_path: Path,
        tokenizer: TokenizerWrapper,
        sample_key: str,
        index_path: Path | None = None,
        jq_pattern: str = ".text",
    ) -> None:
        self.path, self.tokenizer, self.sample_key = raw_data_path, tokenizer, sample_key
        self._spans = read_raw_index(index_path or default_index_path(raw_data_path))
        self._text_of = text_extractor(jq_pattern)
        self._jq_pattern = jq_pattern

    def fingerprint(self) -> dict[str, int | str]:
        """What tells the data apart from other data."""
        return {**fingerprint_of(self.path), "tokenizer": self.tokenizer.fingerprint}

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        start, length = self._spans[index]
        with self.path.open("rb") as file:
            file.seek(start)
            text = self._text_of(file.read(length))
        if not isinstance(text, str):
            raise DataError(f"{self.path}:{index + 1}: `{self._jq_pattern}` gives no text")
        return {self.sample_key: np.asarray(self.tokenizer.tokenize(text), dtype=np.int64)}
