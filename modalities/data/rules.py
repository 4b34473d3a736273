"""What must hold between data and the fields that read it. Free of torch and numpy: checked from the config."""

from __future__ import annotations

import struct
from pathlib import Path

_HEADER = struct.Struct("<QI")


def packed_file_is_there(raw_data_path: str, makes_it: bool) -> str | None:
    """A packed file is there, or something makes it."""
    if makes_it or Path(raw_data_path).is_file():
        return None
    what = "is a folder, not a packed file" if Path(raw_data_path).is_dir() else "no such file"
    return (
        f"raw_data_path: {what}: {raw_data_path}; make it with `modalities data pack_encoded_data`, or give pack_from "
        "(relative paths start at the folder in which the command runs)"
    )


def packed_file_has_a_sample(sequence_length: int, raw_data_path: str, reuse_last_target: bool | None) -> str | None:
    """A packed file is long enough for one sample; what else is wrong with it is told when it is opened."""
    num_tokens = _num_tokens(Path(raw_data_path))
    needed = sequence_length if reuse_last_target is False else sequence_length + 1
    if num_tokens is None or num_tokens >= needed:
        return None
    return (
        f"{raw_data_path} has {num_tokens} tokens, which is less than one sample: sequence_length {sequence_length} "
        f"needs {needed}"
    )


def _num_tokens(file: Path) -> int | None:
    """Tokens by the header of a packed file: bytes of data, then bytes per token, both little-endian."""
    if not file.is_file():
        return None
    with file.open("rb") as opened:
        header = opened.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    num_bytes, token_bytes = _HEADER.unpack(header)
    return int(num_bytes // token_bytes) if token_bytes in (1, 2, 4) else None
