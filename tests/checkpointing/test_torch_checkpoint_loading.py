"""Weights for inference, from either kind of checkpoint, on one process."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from modalities.checkpointing.discovery import checkpoints_in
from modalities.checkpointing.torch_checkpoint_loading import TorchCheckpointLoading, make_torch_checkpoint_loading
from modalities.composition.compose import ConfigRequest, compose_config
from modalities.config.environment import Environment
from modalities.exceptions import CheckpointError
from modalities.factory.build import build
from modalities.generate import GenerationRecipe
from modalities.run import RunRequest, plan_of, run
from modalities.testing.ranks import run_on_ranks
from modalities.testing.tiny import read_tensors, tiny_config, write_config


def _run(config: Path, root: Path, experiment_id: str) -> None:
    run(RunRequest(config, root, experiment_id))


def _model(tree: dict[str, Any], folder: Path) -> torch.nn.Module:
    config = write_config(tree, folder / "config.yaml")
    loaded = compose_config(ConfigRequest(Environment(config, folder, "x")), GenerationRecipe)
    recipe = build(plan_of(loaded), GenerationRecipe)
    model = recipe.model_raw
    assert isinstance(model, torch.nn.Module)
    return model


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_of_the_checkpoint(tmp_path: Path, wrapper: str, tied: bool) -> None:
    tree = tiny_config(tmp_path, wrapper=wrapper, num_steps=2, use_weight_tying=tied)
    run_on_ranks(_run, 2, write_config(tree, tmp_path / "config.yaml"), tmp_path, "run")
    checkpoint = checkpoints_in(tmp_path / "run" / "checkpoints")[-1]
    if checkpoint.is_distributed:
        tensors = read_tensors(checkpoint.path)
        saved = {k.removeprefix("app.model."): v for k, v in tensors.items() if k.startswith("app.model.")}
    else:
        saved = torch.load(checkpoint.path, weights_only=True)

    model = TorchCheckpointLoading(torch.device("cpu")).load_model_checkpoint(_model(tree, tmp_path), checkpoint.path)
    state = model.state_dict()
    assert state.keys() == saved.keys()
    assert [name for name in state if not torch.equal(state[name], saved[name])] == []
    transformer = model.transformer
    assert (transformer["lm_head"].weight is transformer["wte"].weight) == tied  # type: ignore[index, union-attr]

    loading = TorchCheckpointLoading(torch.device("cpu"), torch.bfloat16)
    reduced = loading.load_model_checkpoint(_model(tree, tmp_path), checkpoint.path)
    assert {parameter.dtype for parameter in reduced.parameters()} == {torch.bfloat16}

    deeper = copy.deepcopy(tree)
    deeper["model_raw"]["config"]["n_layer"] = 3
    with pytest.raises(CheckpointError, match="missing"):
        loading.load_model_checkpoint(_model(deeper, tmp_path), checkpoint.path)

    if checkpoint.is_distributed:
        os.truncate(checkpoint.path / "__0_0.distcp", 2000)
        with pytest.raises(CheckpointError, match=r"__0_0.distcp: has 2000 bytes, \d+ were written") as refusal:
            loading.load_model_checkpoint(_model(tree, tmp_path), checkpoint.path)
        assert "Traceback" not in str(refusal.value)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    loading = make_torch_checkpoint_loading("cpu", None)
    for name, content in (("text.bin", b"hello"), ("empty.bin", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match="cannot be read"):
            loading.load_model_checkpoint(model, tmp_path / name)
    with pytest.raises(CheckpointError, match="no such checkpoint file"):
        loading.load_model_checkpoint(model, tmp_path / "absent.bin")
    torch.save([1], tmp_path / "list.bin")
    with pytest.raises(CheckpointError, match="holds a list"):
        loading.load_model_checkpoint(model, tmp_path / "list.bin")
