"""The safetensors format: eight bytes with the header's length, the header in JSON, the tensors' elements.

As documented at https://github.com/huggingface/safetensors; a folder has one file, ``model.safetensors``, or several and
``model.safetensors.index.json``, which names the file of each tensor, as transformers has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modalities.exceptions import CheckpointError, DamagedCheckpoint

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SUFFIX = ".safetensors"
TIED_KEY = "modalities.tied"
"""In the header's and the index's metadata: a JSON object with the kept name of each tied tensor that is left out."""

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

Layout = tuple[tuple[int, ...], torch.dtype]


def is_safetensors(location: Path) -> bool:
    """Whether a path is a ``.safetensors`` file, the index of several, or a folder with either."""
    if location.is_dir():
        return any((location / name).is_file() for name in (INDEX_FILE, SINGLE_FILE))
    return location.is_file() and (location.suffix == SUFFIX or location.name == INDEX_FILE)


class SafetensorsFiles:
    """The tensors of one file or of several.

    Args:
        location: A file, an index, or a folder with either.

    Attributes:
        metadata: Texts that were stored beside the tensors.
        tied: By name of a tied tensor that is not stored, the name of the one that is.

    Raises:
        CheckpointError: A file is damaged, or one that the index names is missing.
    """

    def __init__(self, location: Path) -> None:
        if location.is_dir():
            index = location / INDEX_FILE
            location = index if index.is_file() else location / SINGLE_FILE
        self.location = location
        self._places: dict[str, Path] = {}
        if location.name == INDEX_FILE:
            metadata, names = _read_index(location)
            self._places = {name: location.with_name(file) for name, file in names.items()}
        else:
            with _opened(location) as file:
                metadata = file.metadata() or {}
                self._places = dict.fromkeys(file.keys(), location)
        self.metadata: Mapping[str, Any] = metadata
        self.tied = self._tied()

    @property
    def files(self) -> list[Path]:
        """All files that hold tensors, and the index if there is one."""
        index = [self.location] if self.location.name == INDEX_FILE else []
        return [*dict.fromkeys(self._places.values()), *index]

    def layouts(self) -> dict[str, Layout]:
        """Shape and type of every stored tensor by name, in the order of the files."""
        layouts: dict[str, Layout] = {}
        for path in dict.fromkeys(self._places.values()):
            with _opened(path) as file:
                stored = set(file.keys())
                for name in (name for name, place in self._places.items() if place == path):
                    if name not in stored:
                        raise DamagedCheckpoint(
                            f"{self.location} names `{name}` in {path.name}, which does not hold it"
                        )
                    part = file.get_slice(name)
                    dtype = _DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise CheckpointError(f"`{name}` in {path} has the type {part.get_dtype()}, unknown here")
                    layouts[name] = tuple(part.get_shape()), dtype
        return layouts

    def read(self, name: str) -> Tensor:
        """A stored tensor.

        Raises:
            CheckpointError: Its file cannot be read.
        """
        with _opened(self._places[name]) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def _tied(self) -> dict[str, str]:
        try:
            tied = {str(alias): str(name) for alias, name in json.loads(self.metadata.get(TIED_KEY, "{}")).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{self.location} has no readable `{TIED_KEY}`: {error}") from error
        for alias, name in tied.items():
            if name not in self._places or alias in self._places:
                raise DamagedCheckpoint(
                    f"{self.location} says that `{alias}` is `{name}`, which does not fit its tensors"
                )
        return tied


def _read_index(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        content = json.loads(path.read_bytes())
        names = {str(name): str(file) for name, file in content["weight_map"].items()}
        metadata = dict(content.get("metadata") or {})
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is no index of safetensors files ({type(error).__name__})") from error
    odd = [file for file in names.values() if Path(file).name != file]
    if odd:
        raise DamagedCheckpoint(f"{path} names a file outside its folder: {odd[0]!r}")
    return metadata, names


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
