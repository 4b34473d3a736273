"""Packed token files (``.pbin``).

Layout, all integers unsigned and little-endian: bytes 0 to 7 the length of the data section in bytes; 8 to 11 the bytes
per token (1, 2 or 4); then the data section, the documents' token ids back to back; then a pickled list of (offset in
the data section, length) in bytes, one pair per document. A ``.pbin.json`` beside it tells how it was made.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modalities.data.files import output_file
from modalities.data.safe_pickle import load_spans
from modalities.exceptions import DataError

HEADER_BYTES = 12
_DTYPES = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


@dataclass(frozen=True)
class PackedFileInfo:
    """How a packed file was made; kept as JSON beside it.

    Args:
        num_documents: Documents in it.
        num_tokens: Tokens in it, end-of-document tokens included.
        vocab_size: Of the tokenizer.
        max_token_id: The largest id in it.
        end_of_document_id: The id that ends each document.
        tokenizer_fingerprint: Of the tokenizer.
        jq_pattern: What was taken of each line.
        source_name: File name of the text.
        source_fingerprint: Of the text's content.
    """

    num_documents: int
    num_tokens: int
    vocab_size: int
    max_token_id: int
    end_of_document_id: int
    tokenizer_fingerprint: str
    jq_pattern: str
    source_name: str
    source_fingerprint: str


def token_size_bytes(vocab_size: int) -> int:
    """Bytes per token for a vocabulary: 1 up to 2**8 ids, 2 up to 2**16, 4 up to 2**32."""
    for size in _DTYPES:
        if vocab_size <= 2 ** (8 * size):
            return size
    raise DataError(f"a vocabulary of {vocab_size} ids does not fit 4 bytes per token")


def info_path(path: Path) -> Path:
    """Where the JSON beside a packed file is."""
    return path.with_name(path.name + ".json")


def read_info(path: Path) -> PackedFileInfo | None:
    """How a packed file was made; None where nothing (readable) tells, as beside files from elsewhere."""
    try:
        return PackedFileInfo(**json.loads(info_path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


class PackedFileWriter:
    """Streams documents into a packed file.

    Args:
        file: Opened for writing at its start.
        vocab_size: Ids must be below it; sets the bytes per token.
    """

    def __init__(self, file: Any, vocab_size: int) -> None:
        self._file, self._vocab_size = file, vocab_size
        self._dtype = _DTYPES[token_size_bytes(vocab_size)]
        self._spans: list[tuple[int, int]] = []
        self._offset = 0
        self.max_token_id = 0
        file.write(bytes(HEADER_BYTES))

    @property
    def num_documents(self) -> int:
        return len(self._spans)

    @property
    def num_tokens(self) -> int:
        return self._offset // self._dtype.itemsize

    def write_document(self, token_ids: Iterable[int]) -> None:
        """Append a document, its end-of-document token included.

        Raises:
            DataError: An id is not of the vocabulary.
        """
        ids = np.fromiter(token_ids, dtype=np.int64)
        largest = int(ids.max())
        if largest >= self._vocab_size or int(ids.min()) < 0:
            raise DataError(f"token id {largest} is not of the vocabulary of {self._vocab_size} ids")
        self.max_token_id = max(self.max_token_id, largest)
        content = ids.astype(self._dtype).tobytes()
        self._file.write(content)
        self._spans.append((self._offset, len(content)))
        self._offset += len(content)

    def finish(self) -> None:
        """Write the index and the header."""
        self._file.write(pickle.dumps(self._spans, protocol=4))
        self._file.seek(0)
        self._file.write(self._offset.to_bytes(8, "little") + self._dtype.itemsize.to_bytes(4, "little"))


def write_info(path: Path, info: PackedFileInfo) -> None:
    """Write the JSON beside a packed file."""
    with output_file(info_path(path)) as file:
        file.write(json.dumps(asdict(info), indent=2).encode() + b"\n")


def open_tokens(path: Path) -> NDArray[Any]:
    """Map the token ids of a packed file, (num_tokens,) in the file's width, without reading them.

    Raises:
        DataError: The file is absent, truncated, or no packed file.
    """
    data_bytes, width = _read_header(path)
    num_tokens = data_bytes // width
    if num_tokens == 0:
        raise DataError(f"{path} holds no tokens")
    return np.memmap(path, dtype=_DTYPES[width], mode="r", offset=HEADER_BYTES, shape=(num_tokens,))


def read_document_spans(path: Path) -> list[tuple[int, int]]:
    """(offset, length) of each document in the data section, in bytes.

    Raises:
        DataError: The file is absent, truncated, or no packed file.
    """
    data_bytes, _ = _read_header(path)
    with path.open("rb") as file:
        file.seek(HEADER_BYTES + data_bytes)
        return load_spans(file.read(), str(path))


def _read_header(path: Path) -> tuple[int, int]:
    try:
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
            size = file.seek(0, 2)
    except OSError as error:
        raise DataError(f"cannot read the packed file {path}: {error.strerror}") from error
    if len(header) < HEADER_BYTES:
        raise DataError(f"{path} is truncated: {len(header)} bytes, less than a header; pack it again")
    data_bytes, width = int.from_bytes(header[:8], "little"), int.from_bytes(header[8:], "little")
    if width not in _DTYPES or data_bytes % width:
        raise DataError(
            f"{path} is no packed file: its header tells {width} bytes per token; `modalities data` makes one"
        )
    if size <= HEADER_BYTES + data_bytes:
        needed = HEADER_BYTES + data_bytes
        raise DataError(f"{path} is truncated: its header tells more than {needed} bytes, it has {size}; pack it again")
    return data_bytes, width
