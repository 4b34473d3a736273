"""What of a distributed checkpoint a rank reads, and whether the checkpoint fits."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import DTensor

from modalities.checkpointing.key_report import KeyComparison, TensorForm, report_of
from modalities.checkpointing.verification import Level
from modalities.config.suggestions import nearest
from modalities.exceptions import CheckpointError, DamagedCheckpoint


@dataclass(frozen=True)
class LoadingOptions:
    """How a checkpoint is read.

    Args:
        verify: ``full`` compares checksums of all data, ``sizes`` only the files' sizes, ``off`` nothing.
        strict: Every key of the run is in the checkpoint, and the other way round.
        include: Only keys that match one of these patterns (``*`` is any text) are loaded; None loads all.
        exclude: Keys that match one of these are not loaded.
        allow_cast: Tensors may be of another type in the checkpoint; they are converted.
    """

    verify: Level = "full"
    strict: bool = True
    include: Sequence[str] | None = None
    exclude: Sequence[str] = ()
    allow_cast: bool = False

    def wants(self, key: str) -> bool:
        """Whether a key is loaded; patterns match it with or without the ``app.`` before it."""
        names = (key, key.removeprefix("app."))
        included = self.include is None or _matches(names, self.include)
        return included and not _matches(names, self.exclude)

    def require_matches(self, keys: Sequence[str]) -> None:
        """Check that every pattern has something to say.

        Raises:
            CheckpointError: One matches none of the keys, of which there are those of the run and of the checkpoint.
        """
        names = {name for key in keys for name in (key, key.removeprefix("app."))}
        for pattern in [*(self.include or ()), *self.exclude]:
            if not _matches(tuple(names), [pattern]):
                near = nearest(pattern, sorted(names), limit=1)
                hint = f"; a near one is {near[0]}" if near else ""
                raise CheckpointError(f"checkpoint_loading: no key matches the pattern `{pattern}`{hint}")


class CheckedLoadPlanner(DefaultLoadPlanner):
    """Plans what this rank reads.

    Args:
        options: What is wanted.
    """

    def __init__(self, options: LoadingOptions) -> None:
        super().__init__(flatten_sharded_tensors=False, allow_partial_load=True)
        self.options = options
        self.skipped: list[str] = []

    def plan(self, state: dict[str, Any], metadata: Metadata, checkpoint: Path) -> list[ReadItem]:
        """What this rank reads into the state.

        Raises:
            CheckpointError: A pattern matches nothing; or keys, shapes or types differ, all of which is told together.
            DamagedCheckpoint: The checkpoint does not hold every part of a tensor.
        """
        self.set_up_planner(state, metadata, False)
        self.options.require_matches([*self.state_dict, *metadata.state_dict_metadata])
        wanted = {key: value for key, value in self.state_dict.items() if self.options.wants(key)}
        self._compare(wanted, metadata, checkpoint)
        loaded = {key: value for key, value in wanted.items() if key in metadata.state_dict_metadata}
        self.skipped = [key for key in self.state_dict if key not in loaded]
        items = create_default_local_load_plan(loaded, metadata, strict=False).items
        _require_coverage(loaded, items, checkpoint)
        return items

    def _compare(self, wanted: Mapping[str, Any], metadata: Metadata, checkpoint: Path) -> None:
        own = {key: _form(value) for key, value in wanted.items()}
        stored = metadata.state_dict_metadata
        saved = {
            key: TensorForm(tuple(s.size), s.properties.dtype) if isinstance(s, TensorStorageMetadata) else None
            for key, s in stored.items()
            # what lies beside the app state in checkpoints of other tools is nobody's here
            if key in own or (key not in self.state_dict and self._is_ours(key, stored[key]))
        }
        comparison = KeyComparison(own, saved, self.options.strict, self.options.allow_cast)
        if (report := report_of(comparison, checkpoint)) is not None:
            raise CheckpointError(report)

    def _is_ours(self, key: str, stored: Any) -> bool:
        """Whether a key that the run lacks is told: a tensor of the app state, if it is wanted at all."""
        return key.startswith("app.") and isinstance(stored, TensorStorageMetadata) and self.options.wants(key)


def _form(value: Any) -> TensorForm | None:
    return TensorForm(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


def _require_coverage(loaded: Mapping[str, Any], items: Sequence[ReadItem], checkpoint: Path) -> None:
    """Every element of every target is read exactly once: parts that are not in the checkpoint are left as they are."""
    num_read: dict[str, int] = {}
    for item in items:
        if item.type == LoadItemType.TENSOR:
            key = item.dest_index.fqn
            num_read[key] = num_read.get(key, 0) + torch.Size(item.lengths).numel()
    for key, value in loaded.items():
        if isinstance(value, Tensor) and num_read.get(key, 0) != (expected := _num_local(value)):
            raise DamagedCheckpoint(
                f"the checkpoint {checkpoint} holds {num_read.get(key, 0)} of {expected} elements of `{key}` that this "
                "rank needs: files of some rank are missing in it"
            )


def _num_local(value: Any) -> int:
    if hasattr(value, "local_shards"):
        return sum(shard.tensor.numel() for shard in value.local_shards())
    if isinstance(value, DTensor):
        return value.to_local().numel() if value.device_mesh.get_coordinate() is not None else 0
    return int(value.numel())


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(re.fullmatch(fnmatch.translate(pattern), name) for pattern in patterns for name in names)
