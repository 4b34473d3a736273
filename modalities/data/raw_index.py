"""The raw index: where each line of a JSONL file starts and how long it is."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

from modalities.data.files import FileExistencePolicy, output_file
from modalities.data.safe_pickle import load_spans
from modalities.exceptions import DataError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def create_raw_index(
    src_path: Path,
    index_path: Path | None = None,
    file_existence_policy: FileExistencePolicy = FileExistencePolicy.ERROR,
) -> Path:
    """Index a JSONL file.

    Args:
        src_path: One JSON document per line, UTF-8.
        index_path: Default: the source's name with suffix ``.idx``.
        file_existence_policy: What to do if the index exists.

    Returns:
        The index file: a pickled list of (start, length) in bytes, line ends excluded.

    Raises:
        DataError: The source is absent or empty, or a line is blank or no JSON; the message has its number.
    """
    index_path = index_path or default_index_path(src_path)
    if file_existence_policy.allows(index_path):
        spans = list(_spans(src_path))
        with output_file(index_path) as file:
            file.write(pickle.dumps(spans, protocol=4))
    return index_path


def default_index_path(src_path: Path) -> Path:
    """``corpus.idx`` beside ``corpus.jsonl``."""
    return src_path.with_suffix(".idx")


def read_raw_index(index_path: Path) -> list[tuple[int, int]]:
    """Starts and lengths of the lines, in bytes.

    Raises:
        DataError: The file is absent or holds no index.
    """
    try:
        return load_spans(index_path.read_bytes(), str(index_path))
    except OSError as error:
        raise DataError(f"cannot read the index {index_path}: {error.strerror}") from error


def read_lines(src_path: Path) -> Iterator[tuple[int, bytes]]:
    """Byte offset and content of each line, line ends and a byte order mark excluded.

    Lines end at a line feed only: other separators that Python knows are legal inside JSON strings.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        with src_path.open("rb") as file:
            offset = 0
            for line in file:
                content = line.removesuffix(b"\n").removesuffix(b"\r")
                start = offset
                if offset == 0 and content.startswith(_BYTE_ORDER_MARK):
                    content, start = content.removeprefix(_BYTE_ORDER_MARK), len(_BYTE_ORDER_MARK)
                yield start, content
                offset += len(line)
    except OSError as error:
        raise DataError(f"cannot read {src_path}: {error.strerror}") from error


def _spans(src_path: Path) -> Iterator[tuple[int, int]]:
    number = 0
    for number, (start, line) in enumerate(read_lines(src_path), start=1):
        if not line.strip():
            raise DataError(f"{src_path}:{number}: a blank line; remove it")
        try:
            json.loads(line)
        except ValueError as error:
            raise DataError(f"{src_path}:{number}: no valid JSON: {error}") from error
        yield start, len(line)
    if number == 0:
        raise DataError(f"{src_path} is empty; it needs at least one document")
