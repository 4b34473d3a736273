"""The published API of the checkpointing package, name by name."""

from __future__ import annotations

import enum
import inspect
from typing import Any

import pytest

from modalities.checkpointing.fsdp import fsdp_checkpoint_loading as loading
from modalities.checkpointing.fsdp import fsdp_checkpoint_saving as saving

SIGNATURES = {
    (loading.DCPCheckpointLoading, "__init__"): ["self", "global_rank"],
    (loading.DCPCheckpointLoading, "load_checkpoint_"): ["self", "app_state", "checkpoint_dir_path"],
    (loading.FSDP1CheckpointLoading, "__init__"): [
        "self",
        "global_rank",
        "block_names",
        "mixed_precision_settings",
        "sharding_strategy",
    ],
    (loading.FSDP1CheckpointLoading, "load_model_checkpoint"): ["self", "model", "file_path"],
    (loading.FSDP1CheckpointLoading, "load_optimizer_checkpoint_"): ["self", "optimizer", "model", "file_path"],
    (saving.DCPCheckpointSaving, "__init__"): ["self", "checkpoint_path", "experiment_id", "global_rank"],
    (saving.FSDP1CheckpointSaving, "__init__"): ["self", "checkpoint_path", "experiment_id", "global_rank"],
}

ANNOTATIONS = {
    (loading.DCPCheckpointLoading, "__init__"): {"global_rank": "int"},
    (loading.DCPCheckpointLoading, "load_checkpoint_"): {"app_state": "AppState", "checkpoint_dir_path": "Path"},
    (loading.FSDP1CheckpointLoading, "load_model_checkpoint"): {
        "model": "nn.Module",
        "file_path": "Path",
        "return": "nn.Module",
    },
    (loading.FSDP1CheckpointLoading, "load_optimizer_checkpoint_"): {
        "optimizer": "Optimizer",
        "model": "FullyShardedDataParallel",
        "file_path": "Path",
    },
    (saving.DCPCheckpointSaving, "__init__"): {"checkpoint_path": "Path", "experiment_id": "str", "global_rank": "int"},
    (saving.FSDP1CheckpointSaving, "__init__"): {
        "checkpoint_path": "Path",
        "experiment_id": "str",
        "global_rank": "int",
    },
}

BASES = {
    loading.DCPCheckpointLoading: "DistributedCheckpointLoadingIF",
    loading.FSDP1CheckpointLoading: "FSDP1CheckpointLoadingIF",
    saving.DCPCheckpointSaving: "CheckpointSavingExecutionABC",
    saving.FSDP1CheckpointSaving: "CheckpointSavingExecutionABC",
}


@pytest.mark.parametrize(("owner", "method"), SIGNATURES)
def test_parameters(owner: type, method: str) -> None:
    parameters = inspect.signature(getattr(owner, method)).parameters
    assert list(parameters) == SIGNATURES[owner, method]
    assert all(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())


@pytest.mark.parametrize(("owner", "method"), ANNOTATIONS)
def test_annotations(owner: type, method: str) -> None:
    annotations: dict[str, Any] = getattr(owner, method).__annotations__
    assert ANNOTATIONS[owner, method].items() <= annotations.items()


@pytest.mark.parametrize("owner", BASES)
def test_base_class(owner: type) -> None:
    assert [base.__name__ for base in owner.__bases__] == [BASES[owner]]


def test_entity_types() -> None:
    assert issubclass(saving.CheckpointingEntityType, enum.Enum)
    assert {e.name: e.value for e in saving.CheckpointingEntityType} == {"MODEL": "model", "OPTIMIZER": "optimizer"}


def test_name_structures() -> None:
    assert saving.DCPCheckpointSaving.CHECKPOINT_FOLDER_STRUCTURE == (
        "eid_{experiment_id}-seen_steps_{num_seen_steps}-seen_tokens_{num_seen_tokens}"
        "-target_steps_{num_target_steps}-target_tokens_{num_target_tokens}"
    )
    assert saving.FSDP1CheckpointSaving.CHECKPOINT_STRUCTURE == (
        "eid_{experiment_id}-{entity}-seen_steps_{num_seen_steps}-seen_tokens_{num_seen_tokens}"
        "-target_steps_{num_target_steps}-target_tokens_{num_target_tokens}.bin"
    )


def test_public_classes_are_all_there_is() -> None:
    for module, names in (
        (loading, {"DCPCheckpointLoading", "FSDP1CheckpointLoading"}),
        (saving, {"CheckpointingEntityType", "DCPCheckpointSaving", "FSDP1CheckpointSaving"}),
    ):
        defined = {n for n, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__}
        assert defined == names
