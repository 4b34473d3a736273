"""Reading pickles of a checkpoint without running what a hostile one might hold."""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from modalities.checkpointing.paths import parse_checkpoint_name
from modalities.exceptions import CheckpointError, DamagedCheckpoint
from modalities.parallel.parameter_names import clean_names, without_wrappers

METADATA_FILE = ".metadata"

_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("collections", "OrderedDict"),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")


def read_metadata_bytes(folder: Path) -> bytes:
    """A folder's ``.metadata``, not looked into.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """
    try:
        return (folder / METADATA_FILE).read_bytes()
    except FileNotFoundError:
        message = f"{folder} is no DCP checkpoint, or an unfinished one: it has no {METADATA_FILE}"
        raise CheckpointError(message) from None
    except OSError as error:
        raise CheckpointError(f"{folder / METADATA_FILE} cannot be read: {error.strerror}") from error


def parse_metadata(content: bytes, folder: Path) -> Metadata:
    """Unpickle a ``.metadata`` through an unpickler that admits DCP's own classes only.

    Names of wrappers, which other tools leave in keys, are not in it any more.

    Raises:
        DamagedCheckpoint: It is damaged, or holds anything else.
    """
    file = folder / METADATA_FILE
    try:
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        stored, places = metadata.state_dict_metadata, metadata.storage_data or {}
        return replace(
            metadata,
            state_dict_metadata={without_wrappers(key): value for key, value in stored.items()},
            storage_data={replace(index, fqn=without_wrappers(index.fqn)): place for index, place in places.items()},
        )
    except Exception as error:
        # a damaged pickle raises whatever its bytes happen to mean
        raise DamagedCheckpoint(f"{file} is damaged or not to be trusted: {error}") from error


def file_lengths(metadata: Metadata) -> dict[str, int]:
    """Bytes that files must have at least for what a ``.metadata`` says to be in them, by name."""
    lengths: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        lengths[place.relative_path] = max(lengths.get(place.relative_path, 0), place.offset + place.length)
    return lengths


def load_plain(content: io.BytesIO, name: str) -> Any:
    """Unpickle tensors and plain values, and nothing else.

    Raises:
        CheckpointError: It holds anything else.
    """
    try:
        return torch.load(content, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"`{name}` of the checkpoint is no plain value and is not unpickled: {error}") from error


def read_state_file(file_path: Path) -> dict[str, Any]:
    """Read a file of full state without running code from it; keys are freed of the names of wrappers.

    Raises:
        DamagedCheckpoint: It is named like a checkpoint's, and damaged or more than tensors and plain values.
        CheckpointError: It is absent, or no such file.
    """
    if not file_path.is_file():
        raise CheckpointError(f"no such checkpoint file: {file_path}")
    try:
        state = torch.load(file_path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError, OSError) as error:
        reason = str(error).partition("\n")[0]
        # a file of any other name may never have been one
        kind = CheckpointError if parse_checkpoint_name(file_path) is None else DamagedCheckpoint
        raise kind(f"the checkpoint file {file_path} cannot be read: {reason}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file_path} holds a {type(state).__name__}, not a state dict")
    return _cleaned(state)


def _cleaned(state: dict[Any, Any]) -> dict[Any, Any]:
    """A state without the names of wrappers, be it a model's or an optimizer's by parameter name."""
    if isinstance(state.get("state"), dict) and isinstance(state.get("param_groups"), list):
        states, groups = state["state"], state["param_groups"]
        in_groups = [name for group in groups if isinstance(group, dict) for name in group.get("params", ())]
        clean = clean_names(name for name in (*states, *in_groups) if isinstance(name, str))
        return {
            **state,
            "state": {clean.get(name, name): value for name, value in states.items()},
            "param_groups": [
                {**group, "params": [clean.get(name, name) for name in group["params"]]}
                if isinstance(group, dict) and isinstance(group.get("params"), list)
                else group
                for group in groups
            ],
        }
    clean = clean_names(key for key in state if isinstance(key, str))
    return {clean.get(key, key): value for key, value in state.items()}
