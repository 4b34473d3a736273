"""Full states of an FSDP1 model and its optimizer, streamed into files of ``torch.save`` that rank 0 writes.

The skeleton of a file, which is all of it but the tensors' elements, is made first. The elements go in between as they
are gathered, so that no rank ever holds more than a unit of the model.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from modalities.checkpointing.manifest import FileRecord
from modalities.checkpointing.saving.checksummed_file import ChecksummedFile, Opener, write_blocks
from modalities.checkpointing.saving.frames import LINE_BYTES, plain_archives
from modalities.exceptions import CheckpointError
from modalities.parallel.fsdp1_units import FullState, TensorSpec, full_model_state, full_optimizer_state
from modalities.parallel.process_group import fail_together, global_rank


def save_full_model(model: FSDP, path: Path, opener: Opener) -> FileRecord | None:
    """Save the parameters and persistent buffers of a whole model into a file; all ranks must call it.

    ``torch.load(path, weights_only=True)`` gives what :func:`~modalities.parallel.fsdp1.full_model_state_dict` gives;
    tied weights are there once.

    Args:
        model: The outermost module that FSDP1 wraps, between two steps.
        path: Must not exist; of meaning on rank 0 only.
        opener: Carries out the writing.

    Returns:
        Size and checksum of the file on rank 0, None elsewhere.

    Raises:
        CheckpointError: Rank 0 cannot write; raised on all ranks with the cause for its message, after the file was
            removed.
    """
    return _save(full_model_state(model), path, opener)


def save_full_optimizer(model: FSDP, optimizer: Optimizer, path: Path, opener: Opener) -> FileRecord | None:
    """Save the state of a whole optimizer by parameter name into a file; all ranks must call it.

    ``torch.load(path, weights_only=True)`` gives what :func:`~modalities.parallel.fsdp1.full_optimizer_state_dict`
    gives.

    Args:
        model: The outermost module that FSDP1 wraps, between two steps.
        optimizer: Over the model's parameters.
        path: Must not exist; of meaning on rank 0 only.
        opener: Carries out the writing.

    Returns:
        Size and checksum of the file on rank 0, None elsewhere.

    Raises:
        CheckpointError: Rank 0 cannot write, as in :func:`save_full_model`; or the ranks have states of a parameter
            that do not fit together.
    """
    return _save(full_optimizer_state(model, optimizer), path, opener)


def _save(state: FullState, path: Path, opener: Opener) -> FileRecord | None:
    payloads = state.payloads()
    record: FileRecord | None = None
    failure: Exception | None = None
    if global_rank() == 0:
        try:
            elements = ([payload] for payload in payloads if payload.numel())
            record = write_full_file(state.tree, state.specs, elements, path, opener)
        except OSError as error:
            failure = CheckpointError(error.strerror or str(error))
            failure.__cause__ = error
        except Exception as error:
            failure = error
    for _ in payloads:
        pass  # the other ranks send; after a failure rank 0 still takes what they send, lest they wait for it
    fail_together(failure)
    return record


def write_full_file(
    tree: dict[str, Any], specs: Sequence[TensorSpec], elements: Iterator[Iterable[Tensor]], path: Path, opener: Opener
) -> FileRecord:
    """Write a file that ``torch.load`` gives a nested state from.

    Args:
        tree: Nested state with specs for tensors; what is one and the same spec is one tensor in the file.
        specs: All of them, in the order in which their elements are to lie in the file.
        elements: Of each that has some, in that order: contiguous blocks on the CPU, one after the other.
        path: Must not exist.
        opener: Carries out the writing.

    Returns:
        Size and checksum of the file.

    Raises:
        OSError: It cannot be written, and was removed.
    """
    skeleton = _skeleton(tree, specs)
    file = ChecksummedFile(path, opener)
    try:
        with file:
            for part in skeleton:
                if isinstance(part, bytes):
                    file.write(part)
                else:
                    write_blocks(file, next(elements), part)
            return file.record()
    except BaseException:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def _skeleton(tree: dict[str, Any], specs: Sequence[TensorSpec]) -> list[bytes | int]:
    """A ``torch.save`` file as bytes, and the length of the gap for each tensor that has elements, in the given order.

    Args:
        tree: Nested state with specs for tensors.
        specs: All of them, in the order in which their elements are to lie in the file.
    """
    sink: Any = _Sink()
    met = dict.fromkeys(leaf for leaf in tree_leaves(tree) if isinstance(leaf, TensorSpec))
    with FakeTensorMode():
        tensors = {spec: torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype) for spec in specs}
        content: dict[str, Any] = tree_map_only(TensorSpec, tensors.__getitem__, tree)
        if list(met) != list(specs):
            content = _InOrder(content, list(tensors.values()))
        with plain_archives(LINE_BYTES), torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(content, sink)
    return list(sink.parts())


class _InOrder(OrderedDict[str, Any]):
    """A dict whose pickle first meets its tensors in an order of their own, in which ``torch.save`` then stores them.

    Readers compute places from the order in which the pickle meets the tensors. It is therefore made to meet them as
    values of the first key, one overwriting the other, until the real value does.
    """

    def __init__(self, content: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        super().__init__(content)
        self._tensors = tensors

    def __reduce__(self) -> tuple[Any, ...]:
        first = next(iter(self))
        items: Iterator[tuple[str, Any]] = chain(((first, tensor) for tensor in self._tensors), self.items())
        return OrderedDict, (), None, None, items


class _Sink:
    """What ``torch.save`` writes to where it skips the tensors' elements: it passes over each by a seek."""

    def __init__(self) -> None:
        self._written: list[bytes | int] = []

    def write(self, data: bytes | memoryview) -> int:
        self._written.append(bytes(data))
        return len(data)

    def seek(self, num_bytes: int, whence: int) -> None:
        assert whence == os.SEEK_CUR
        self._written.append(num_bytes)

    def flush(self) -> None:
        """Nothing is held back."""

    def parts(self) -> Iterator[bytes | int]:
        """Bytes and lengths of gaps, alternating."""
        pending: list[bytes] = []
        for part in self._written:
            if isinstance(part, bytes):
                pending.append(part)
            else:
                yield b"".join(pending)
                yield part
                pending = []
        yield b"".join(pending)
