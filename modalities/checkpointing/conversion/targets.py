"""Each kind of output, written under temporary names and opened again from there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, set_element
from torch.utils._pytree import tree_map_only

from modalities import durability
from modalities.checkpointing import paths
from modalities.checkpointing.conversion.content import Content, identity_texts
from modalities.checkpointing.conversion.dcp_writing import write_dcp
from modalities.checkpointing.conversion.full_writing import write_full
from modalities.checkpointing.conversion.lazy_tensor import LazyTensor
from modalities.checkpointing.conversion.safetensors_writing import write_safetensors
from modalities.checkpointing.manifest import FileRecord, Origin
from modalities.checkpointing.reading.sources import (
    GROUPS_PREFIX,
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    STATE_PREFIX,
    FileSource,
    FolderSource,
    Form,
    SafetensorsSource,
    TensorSource,
)
from modalities.checkpointing.resume_state import resume_state_bytes
from modalities.checkpointing.saving.checksummed_file import write_file_of
from modalities.checkpointing.saving.description import describe, tensor_record
from modalities.progress import TrainingProgress

Values = Mapping[str, Any]
"""By key of a DCP folder; tensors are lazy."""


@dataclass(frozen=True)
class Identity:
    """What a checkpoint is called, and what it was made of.

    Args:
        experiment_id: The run's.
        progress: Counters at the time of saving.
        origin: The source.
    """

    experiment_id: str
    progress: TrainingProgress
    origin: Origin


@dataclass(frozen=True)
class Written:
    """What lies under temporary names.

    Args:
        records: Size and checksum of each file by its path there.
        names: Final name of each file, by its path there.
        opened: Opens it for reading.
        values: What it must hold.
    """

    records: Mapping[Path, FileRecord]
    names: Mapping[Path, str]
    opened: Callable[[], TensorSource]
    values: Values

    @property
    def files(self) -> dict[str, FileRecord]:
        """Size and checksum of each file by its final name."""
        return {self.names[path]: record for path, record in self.records.items()}


def write_dcp_checkpoint(content: Content, folder: Path, identity: Identity) -> Written:
    """Write a checkpoint folder, all of the content in it."""
    durability.layer.make_folder(folder)
    state = _nested_state(content)
    more = {}
    if content.resume_state is not None:
        more[paths.RESUME_STATE_FILE] = resume_state_bytes(content.resume_state)
    manifest = write_dcp(
        folder,
        state,
        identity.experiment_id,
        identity.progress,
        context=content.context,
        origin=identity.origin,
        more_files=more,
    )
    values, _ = flatten_state_dict(state)
    records = {folder / name: record for name, record in manifest.files.items()}
    return Written(records, {path: path.name for path in records}, partial(FolderSource, folder), values)


def write_fsdp1_checkpoint(
    content: Content, temporary: Mapping[str, Path], names: Mapping[str, Path], identity: Identity
) -> Written:
    """Write the files of model, optimizer, resume state and manifest.

    Args:
        content: With an optimizer.
        temporary: Where to, by entity.
        names: Their final names, by entity.
        identity: For the manifest.
    """
    records = {}
    if content.resume_state is not None:
        scheduler = tree_map_only(LazyTensor, lambda tensor: tensor.read(), content.lr_scheduler)
        resume_state = replace(content.resume_state, lr_scheduler=scheduler)
        path = temporary[paths.RESUME_STATE_ENTITY]
        records[path] = write_file_of(path, durability.layer, resume_state_bytes(resume_state))
    optimizer = {"state": content.states, "param_groups": _groups(content)}
    records[temporary["optimizer"]] = write_full(temporary["optimizer"], optimizer)
    records[temporary["model"]] = write_full(temporary["model"], content.model)
    final_names = {temporary[entity]: names[entity].name for entity in temporary}
    tensors = {
        name: tensor_record(value.form.torch_dtype, value.form.shape)
        for name, value in content.model.items()
        if isinstance(value, LazyTensor)
    }
    manifest = describe(
        "fsdp1",
        identity.experiment_id,
        identity.progress,
        content.context,
        {},
        {final_names[path]: record for path, record in records.items()},
        tensors,
        identity.origin,
    )
    write_file_of(temporary[paths.MANIFEST_ENTITY], durability.layer, manifest.to_bytes())
    opened = partial(FileSource, temporary["model"], temporary["optimizer"])
    return Written(records, final_names, opened, {**_model_values(content), **_optimizer_values(content)})


def write_weights(content: Content, path: Path, final: Path) -> Written:
    """Write the model into one file of torch's."""
    record = write_full(path, content.model)
    return Written({path: record}, {path: final.name}, partial(FileSource, path), _model_values(content))


def write_weights_as_safetensors(content: Content, path: Path, final: Path, max_shard_bytes: int) -> Written:
    """Write the model's tensors into one safetensors file, or into shards if the path is no such file's."""
    is_file = final.suffix == path.suffix == ".safetensors"
    if not is_file:
        durability.layer.make_folder(path)
    written = write_safetensors(
        path,
        content.weights,
        max_shard_bytes=max_shard_bytes,
        metadata=identity_texts(content),
        tied=content.tied,
    )
    values = {key: value for key, value in _model_values(content).items() if isinstance(value, LazyTensor)}
    records = {path if is_file else path / name: record for name, record in written.items()}
    names = {place: final.name if is_file else place.name for place in records}
    return Written(records, names, partial(SafetensorsSource, path), values)


def _nested_state(content: Content) -> dict[str, Any]:
    app: dict[str, Any] = {"model": content.model}
    if content.has_optimizer:
        # flat, as AppState saves it
        app["optimizer"] = {
            key.removeprefix(OPTIMIZER_PREFIX): value for key, value in _optimizer_values(content).items()
        }
    if content.lr_scheduler is not None:
        app["lr_scheduler"] = tree_map_only(Tensor, _as_lazy, content.lr_scheduler)
    state: dict[str, Any] = {"app": app}
    for path, value in content.others.values():
        set_element(state, path, value)
    return state


def _as_lazy(tensor: Tensor) -> LazyTensor:
    return LazyTensor("app.lr_scheduler", Form.of(tensor.shape, tensor.dtype), lambda: tensor)


def _model_values(content: Content) -> Values:
    return {f"{MODEL_PREFIX}{name}": value for name, value in content.model.items()}


def _optimizer_values(content: Content) -> Values:
    return {
        f"{prefix}{name}.{key}": value
        for prefix, section in ((STATE_PREFIX, content.states), (GROUPS_PREFIX, content.options))
        for name, inner in section.items()
        for key, value in inner.items()
    }


def _groups(content: Content) -> list[dict[str, Any]]:
    """The optimizer's groups as they were, or where nobody knows them one for each parameter.

    Groups that happen to have equal settings must not become one: torch puts a stored group into one group of the
    optimizer only.
    """
    groups: Sequence[Sequence[str]] = content.parameter_groups
    if sorted(name for group in groups for name in group) != sorted(content.options):
        groups = [[name] for name in content.options]
    return [{**content.options[group[0]], "params": list(group)} for group in groups if group]
