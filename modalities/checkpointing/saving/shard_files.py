"""The files of a folder of ``torch.distributed.checkpoint``: a rank's shards, and the index of all."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from modalities.checkpointing.manifest import FileRecord
from modalities.checkpointing.safe_reading import METADATA_FILE
from modalities.checkpointing.saving.checksummed_file import ChecksummedFile, Opener, write_blocks
from modalities.checkpointing.saving.frames import LINE_BYTES, alignment_of
from modalities.checkpointing.saving.planning import RankPlan


def write_shards(
    plan: RankPlan,
    elements: Iterable[Iterable[Tensor]],
    values: Sequence[tuple[MetadataIndex, bytes]],
    folder: Path,
    opener: Opener,
) -> tuple[FileRecord, dict[MetadataIndex, _StorageInfo]]:
    """Write a rank's file.

    Args:
        plan: What lies where in it.
        elements: Of each tensor, in the order of the plan: contiguous blocks on the CPU, one after the other.
        values: What is no tensor, rendered.
        folder: Gets the file.
        opener: Carries out the writing.

    Returns:
        The file's record, and where in it the values are.
    """
    places: dict[MetadataIndex, _StorageInfo] = {}
    with ChecksummedFile(folder / plan.file_name, opener) as file:
        for item, blocks in zip(plan.tensors, elements, strict=True):
            file.pad_to(alignment_of(item.frame.num_payload_bytes))
            file.write(item.frame.head)
            if item.frame.num_payload_bytes:
                write_blocks(file, blocks, item.frame.num_payload_bytes)
                file.write(item.frame.tail)
        for index, value in values:
            file.pad_to(LINE_BYTES)
            places[index] = _StorageInfo(plan.file_name, file.num_bytes, len(value))
            file.write(value)
        return file.record(), places


def write_index(metadata: Metadata, folder: Path, opener: Opener) -> FileRecord:
    """Write ``.metadata``."""
    with ChecksummedFile(folder / METADATA_FILE, opener) as file:
        file.write(pickle.dumps(metadata))
        return file.record()
