"""Starting a run with the weights of a checkpoint, and nothing else of it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.key_report import KeyComparison, TensorForm, report_of
from modalities.checkpointing.reading.load_planner import LoadingOptions
from modalities.checkpointing.reading.loading import load_
from modalities.checkpointing.reading.sources import MODEL_PREFIX, FolderSource, open_source
from modalities.checkpointing.verification import require_whole_file
from modalities.exceptions import CheckpointError
from modalities.parallel.fsdp1 import load_full_model_state_dict_
from modalities.parallel.fsdp1_units import full_model_state
from modalities.parallel.parameter_names import clean_name, without_wrappers
from modalities.parallel.process_group import on_rank_zero


def load_weights_(app_state: AppState, location: Path, options: LoadingOptions) -> None:
    """Put the weights of a checkpoint of any kind into a built app state, in place; all ranks must call it.

    Args:
        app_state: As built; optimizer and scheduler stay so.
        location: A DCP folder, a file of full weights, or safetensors.
        options: What of the model is loaded, and how thoroughly the checkpoint is checked.

    Raises:
        DamagedCheckpoint: The checkpoint is not as it was written; the app state is as it was.
        CheckpointError: There is none, or it is of another model; the app state is as it was.
    """

    def look() -> tuple[Path, bool]:
        source = open_source(location)
        return source.path, isinstance(source, FolderSource)

    location, is_distributed = on_rank_zero(look)
    on_rank_zero(lambda: require_whole_file(location, options.verify))
    require_equal_ties(app_state, location)
    if is_distributed:
        _load_folder_(app_state, location, options)
        return
    app_state.mark_loaded()
    _load_full_(app_state.model, location, options)


def require_equal_ties(app_state: AppState, location: Path) -> None:
    """Check that a checkpoint has the same under all names of a tied parameter: one would overwrite the other.

    Args:
        app_state: As built.
        location: A DCP folder, a file of full weights, or safetensors.

    Raises:
        CheckpointError: It has not.
    """
    names_of: dict[int, list[str]] = {}
    for part in app_state.model_parts:
        for name, parameter in part.named_parameters(remove_duplicate=False):
            names_of.setdefault(id(parameter), []).append(clean_name(name))

    def check() -> None:
        tied = [names for names in names_of.values() if len(names) > 1]
        if not tied:
            return
        source = open_source(location)
        for names in tied:
            stored = [name for name in names if MODEL_PREFIX + name in source.forms]
            for first, other in pairwise(stored):
                if not torch.equal(source.read(MODEL_PREFIX + first), source.read(MODEL_PREFIX + other)):
                    raise CheckpointError(
                        f"{location} has other weights in {first} than in {other}, which are one in this model; "
                        "set use_weight_tying to false, or take weights of a tied model"
                    )

    on_rank_zero(check)


def _load_folder_(app_state: AppState, folder: Path, options: LoadingOptions) -> None:
    state = {"app": {"model": app_state.model_state_dict()}}
    wanted = LoadingOptions(
        options.verify, options.strict, options.include or ["model.*"], options.exclude, options.allow_cast
    )
    load_(state, folder, wanted)
    app_state.mark_loaded()
    app_state.load_model_state_dict(state["app"]["model"])


def _load_full_(model: nn.Module, location: Path, options: LoadingOptions) -> None:
    names = {without_wrappers(key): key for key in get_model_state_dict(model)}
    tensors = full_model_state(model).tree if isinstance(model, FullyShardedDataParallel) else model.state_dict()
    own = {without_wrappers(key): TensorForm(tuple(t.shape), t.dtype) for key, t in tensors.items()}
    full: dict[str, Tensor] = {}

    def read() -> bool:
        source = open_source(location)
        saved = {
            key.removeprefix(MODEL_PREFIX): TensorForm(form.shape, form.torch_dtype)
            for key, form in source.forms.items()
            if key.startswith(MODEL_PREFIX) and form is not None
        }
        wanted, offered = ({key: form for key, form in forms.items() if _wants(options, key)} for forms in (own, saved))
        options.require_matches([MODEL_PREFIX + key for key in (*own, *saved)])
        comparison = KeyComparison(wanted, offered, options.strict, options.allow_cast)
        if (report := report_of(comparison, source.path)) is not None:
            raise CheckpointError(report)
        for key in wanted:
            if key in offered:
                full[names[key]] = source.read(MODEL_PREFIX + key).to(own[key].dtype)
        return len(full) == len(own)

    load_full_model_state_dict_(model, full, strict=on_rank_zero(read))


def _wants(options: LoadingOptions, name: str) -> bool:
    return options.wants(MODEL_PREFIX + name)
