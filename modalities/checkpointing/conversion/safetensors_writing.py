"""Writing safetensors files as the tensors are read: the header, which has every place in it, comes first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modalities import durability
from modalities.checkpointing.conversion.lazy_tensor import LazyTensor
from modalities.checkpointing.manifest import FileRecord
from modalities.checkpointing.reading.safetensors_files import DTYPE_NAMES, INDEX_FILE, SINGLE_FILE, SUFFIX, TIED_KEY
from modalities.checkpointing.saving.checksummed_file import ChecksummedFile, Opener, write_blocks, write_file_of
from modalities.exceptions import CheckpointError

DEFAULT_MAX_SHARD_BYTES = 5_000_000_000


def write_safetensors(
    path: Path,
    tensors: Mapping[str, LazyTensor],
    *,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
    tied: Mapping[str, str] | None = None,
    opener: Opener | None = None,
) -> dict[str, FileRecord]:
    """Write tensors as one file or as shards with an index, one tensor in memory at a time.

    Args:
        path: A file whose name ends in ``.safetensors``; or a folder that is there, which gets ``model.safetensors``, or
            ``model-00001-of-00002.safetensors`` and so on and ``model.safetensors.index.json``.
        tensors: By name.
        max_shard_bytes: Of the tensors in a file of a folder; one that is larger by itself has a file of its own.
        metadata: Texts that go into the header of each file, and into the index.
        tied: By name of a tensor that is not written, the name of the one that it is tied to; goes into the metadata.
        opener: Carries out the writing.

    Returns:
        Size and checksum of each file, by name.

    Raises:
        CheckpointError: The format has no such type of numbers.
        OSError: A file cannot be written.
    """
    opener = opener or durability.layer
    texts = {"format": "pt", **(metadata or {}), **({TIED_KEY: json.dumps(tied)} if tied else {})}
    if path.suffix == SUFFIX:
        return {path.name: _write_file(path, tensors, texts, opener)}
    shards = _divide(tensors, max_shard_bytes)
    if len(shards) == 1:
        return {SINGLE_FILE: _write_file(path / SINGLE_FILE, shards[0], texts, opener)}
    records: dict[str, FileRecord] = {}
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}{SUFFIX}"
        records[name] = _write_file(path / name, shard, texts, opener)
        file_of |= dict.fromkeys(shard, name)
    total = sum(tensor.form.num_bytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total, **texts}, "weight_map": file_of}
    records[INDEX_FILE] = write_file_of(path / INDEX_FILE, opener, json.dumps(index, indent=2).encode() + b"\n")
    return records


def _divide(tensors: Mapping[str, LazyTensor], max_bytes: int) -> Sequence[dict[str, LazyTensor]]:
    shards: list[dict[str, LazyTensor]] = [{}]
    num_bytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and num_bytes + tensor.form.num_bytes > max_bytes:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = tensor
        num_bytes += tensor.form.num_bytes
    return shards


def _write_file(path: Path, tensors: Mapping[str, LazyTensor], texts: Mapping[str, str], opener: Opener) -> FileRecord:
    # the widest first: each then starts at a multiple of its elements' size, as readers that map the file need it
    ordered = sorted(tensors.items(), key=lambda item: -item[1].form.torch_dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": texts}
    start = 0
    for name, tensor in ordered:
        dtype = DTYPE_NAMES.get(tensor.form.torch_dtype)
        if dtype is None:
            raise CheckpointError(f"`{tensor.key}` is of type {tensor.form.dtype}, which safetensors does not have")
        end = start + tensor.form.num_bytes
        header[name] = {"dtype": dtype, "shape": list(tensor.form.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with ChecksummedFile(path, opener) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, tensor in ordered:
            write_blocks(file, tensor.blocks(), tensor.form.num_bytes)
        return file.record()
