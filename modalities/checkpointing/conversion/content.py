"""What a checkpoint of any kind holds, sorted by what it means, the tensors unread."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import set_element

from modalities.checkpointing.conversion.lazy_tensor import LazyTensor, Tally
from modalities.checkpointing.conversion.proof import ProvenSource
from modalities.checkpointing.conversion.tying import tied_in
from modalities.checkpointing.reading.sources import (
    GROUPS_PREFIX,
    MODEL_PREFIX,
    STATE_PREFIX,
    FileSource,
    FolderSource,
    Form,
    SafetensorsSource,
    TensorSource,
)
from modalities.checkpointing.resume_state import ResumeState, read_resume_state
from modalities.checkpointing.saving.description import RunContext
from modalities.exceptions import DamagedCheckpoint
from modalities.progress import TrainingProgress

SCHEDULER_PREFIX = "app.lr_scheduler."
EXPERIMENT_KEY = "modalities.experiment_id"
PROGRESS_KEY = "modalities.progress"
"""In the metadata of safetensors files: what the name of a checkpoint tells elsewhere."""


_FREQUENCIES = ".inv_freq"


@dataclass
class Content:
    """What a checkpoint holds.

    Args:
        model: Tensors, and values that are none, by name; what is tied is one and the same tensor.
        tied: By name of a tied weight, the name of the one that it is tied to.
        states: Of the optimizer, by parameter and key.
        options: Of the optimizer's groups, by parameter and key.
        parameter_groups: Names in each group, where they are known.
        lr_scheduler: The scheduler's state, if there is one.
        others: Anything else, by key, with its path in the nested state.
        resume_state: If there is one; without the scheduler's state.
        experiment_id: If it is known.
        progress: If it is known.
        context: Of the run that wrote it, as far as it is known.
    """

    model: dict[str, Any]
    tied: Mapping[str, str]
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    parameter_groups: list[list[str]] = field(default_factory=list)
    lr_scheduler: dict[str, Any] | None = None
    others: dict[str, tuple[tuple[Any, ...], Any]] = field(default_factory=dict)
    resume_state: ResumeState | None = None
    experiment_id: str | None = None
    progress: TrainingProgress | None = None
    context: RunContext = field(default_factory=RunContext)

    @property
    def has_optimizer(self) -> bool:
        """Whether it has an optimizer's state, or settings."""
        return bool(self.states or self.options)

    @property
    def weights(self) -> dict[str, LazyTensor]:
        """The tensors of the model without those that are tied to others."""
        return {
            name: value for name, value in self.model.items() if isinstance(value, LazyTensor) and name not in self.tied
        }


def content_of(proven: ProvenSource, dtype: torch.dtype | None, tally: Tally) -> Content:
    """Sort what a source holds.

    Args:
        proven: The source.
        dtype: That floating-point tensors of the model are to have; the optimizer's keep theirs.
        tally: Told of what is read later.

    Raises:
        DamagedCheckpoint: A value cannot be read.
    """
    source, manifest = proven.source, proven.manifest
    tied = {_name(alias): _name(key) for alias, key in tied_in(source).items()}
    content = Content({}, tied)
    paths = _paths_of(source)
    for key, form in source.forms.items():
        value = source.read(key) if form is None else _lazy(source, key, form, dtype, tally)
        if key.startswith(MODEL_PREFIX):
            content.model[_name(key)] = value
            continue
        for prefix, section in ((STATE_PREFIX, content.states), (GROUPS_PREFIX, content.options)):
            name, _, inner = key.removeprefix(prefix).rpartition(".")
            if key.startswith(prefix) and f"{MODEL_PREFIX}{name}" in source.forms:
                section.setdefault(name, {})[inner] = value
                break
        else:
            path = paths.get(key, tuple(key.split(".")))
            if key.startswith(SCHEDULER_PREFIX):
                content.lr_scheduler = content.lr_scheduler or {}
                set_element(content.lr_scheduler, path[2:], value)
            else:
                content.others[key] = path, value
    content.model |= {alias: content.model[name] for alias, name in tied.items()}
    _add_what_lies_beside(content, proven)
    if isinstance(source, FileSource):
        content.parameter_groups = source.parameter_groups
    elif manifest is not None and manifest.origin is not None:
        content.parameter_groups = manifest.origin.parameter_groups
    return content


def _add_what_lies_beside(content: Content, proven: ProvenSource) -> None:
    checkpoint, manifest, source = proven.checkpoint, proven.manifest, proven.source
    if checkpoint is not None:
        resume_state = read_resume_state(checkpoint.resume_state_path)
        if resume_state is not None:
            content.lr_scheduler = content.lr_scheduler or resume_state.lr_scheduler
            content.resume_state = replace(resume_state, lr_scheduler=None)
            content.progress = resume_state.progress
        elif checkpoint.experiment_id:
            content.progress = checkpoint.progress
        content.experiment_id = checkpoint.experiment_id or None
    if manifest is not None:
        content.experiment_id, content.progress = manifest.experiment_id, manifest.progress
        content.context = RunContext(manifest.config_hash, manifest.metrics, manifest.start, manifest.config)
    if isinstance(source, SafetensorsSource):
        texts = source.files.metadata
        content.experiment_id = texts.get(EXPERIMENT_KEY)
        if PROGRESS_KEY in texts:
            try:
                content.progress = TrainingProgress(**json.loads(texts[PROGRESS_KEY]))
            except (ValueError, TypeError) as error:
                raise DamagedCheckpoint(f"{source.path} has no readable `{PROGRESS_KEY}`: {error}") from error


def identity_texts(content: Content) -> dict[str, str]:
    """Experiment and progress as the metadata of safetensors files have them."""
    texts = {}
    if content.experiment_id is not None:
        texts[EXPERIMENT_KEY] = content.experiment_id
    if content.progress is not None:
        texts[PROGRESS_KEY] = json.dumps(asdict(content.progress))
    return texts


def _lazy(source: TensorSource, key: str, form: Form, dtype: torch.dtype | None, tally: Tally) -> LazyTensor:
    written = form
    # a model in fp32 would take rounded frequencies of rotary embeddings as they are
    is_weight = key.startswith(MODEL_PREFIX) and not key.endswith(_FREQUENCIES)
    if dtype is not None and is_weight and form.torch_dtype.is_floating_point:
        written = Form.of(form.shape, dtype)
    return LazyTensor(key, written, partial(source.read, key), tally)


def _paths_of(source: TensorSource) -> Mapping[str, tuple[Any, ...]]:
    """Where each key lies in the nested state that a DCP folder was made of."""
    if not isinstance(source, FolderSource):
        return {}
    planned: Mapping[str, tuple[Any, ...]] = source.metadata.planner_data or {}
    return planned


def _name(key: str) -> str:
    return key.removeprefix(MODEL_PREFIX)
