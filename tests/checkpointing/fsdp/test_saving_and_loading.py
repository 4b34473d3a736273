"""Checkpoints on two ranks: what is written, what is refused, and what failures leave behind."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.discovery import checkpoints_in, locate_checkpoint
from modalities.checkpointing.fsdp.fsdp_checkpoint_loading import DCPCheckpointLoading, FSDP1CheckpointLoading
from modalities.checkpointing.fsdp.fsdp_checkpoint_saving import DCPCheckpointSaving, FSDP1CheckpointSaving
from modalities.checkpointing.restoring import make_fsdp1_loading, restore_
from modalities.checkpointing.verification import Level
from modalities.composition.compose import ConfigRequest, compose_config
from modalities.config.environment import Environment
from modalities.exceptions import CheckpointError
from modalities.factory.build import build
from modalities.generate import GenerationRecipe
from modalities.parallel.fsdp1 import full_optimizer_state_dict, shard_model
from modalities.parallel.settings import MixedPrecisionSettings, ShardingStrategy
from modalities.progress import TrainingProgress
from modalities.run import RunRequest, plan_of, run
from modalities.testing.ranks import run_on_ranks
from modalities.testing.tiny import read_tensors, tiny_config, write_config
from modalities.training.recipe import TrainingRecipe


def _build(config: Path, root: Path, experiment_id: str = "x") -> Any:
    loaded = compose_config(ConfigRequest(Environment(config, root, experiment_id)), TrainingRecipe)
    return build(plan_of(loaded), TrainingRecipe)


def _run(config: Path, root: Path, experiment_id: str) -> None:
    run(RunRequest(config, root, experiment_id))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of 8 steps on two ranks with FSDP2: its config and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(tiny_config(folder), folder / "config.yaml")
    run_on_ranks(_run, 2, config, folder, "run")
    return config, folder / "run" / "checkpoints"


def test_a_folder_holds_the_keys_of_the_app_state(trained: tuple[Path, Path]) -> None:
    _, checkpoints = trained
    metadata = dcp.FileSystemReader(checkpoints_in(checkpoints)[-1].path).read_metadata().state_dict_metadata
    assert {key.split(".")[1] for key in metadata} == {"model", "optimizer", "lr_scheduler"}
    assert "app.model.transformer.h.0.attn.q_attn.weight" in metadata
    assert "app.optimizer.state.transformer.wte.weight.exp_avg" in metadata
    assert "app.optimizer.param_groups.transformer.wte.weight.lr" in metadata


def test_a_stock_reader_reads_the_same_bits(trained: tuple[Path, Path]) -> None:
    _, checkpoints = trained
    path = checkpoints_in(checkpoints)[-1].path
    ours = read_tensors(path)
    stock = {name: torch.empty_like(tensor) for name, tensor in ours.items()}
    dcp.load(stock, checkpoint_id=path, no_dist=True)
    assert len(ours) > 30
    assert [name for name in ours if not torch.equal(ours[name], stock[name])] == []


def test_the_pointer_names_the_last_folder(trained: tuple[Path, Path]) -> None:
    _, checkpoints = trained
    info = json.loads((checkpoints / "last_checkpoint_info.json").read_text())
    assert info == {"checkpoint_folder_path": str(checkpoints_in(checkpoints)[-1].path.absolute())}


def test_nothing_temporary_is_left(trained: tuple[Path, Path]) -> None:
    _, checkpoints = trained
    assert [path.name for path in checkpoints.iterdir() if path.name.startswith(".")] == []


def test_retention_removes_whole_folders_also_after_a_restart(tmp_path: Path) -> None:
    tree = tiny_config(tmp_path, num_steps=4, checkpointing_interval=1)
    tree["checkpoint_saving"]["config"]["checkpoint_saving_strategy"]["config"]["k"] = 2
    tree["settings"]["training_target"] |= {"num_target_steps": 4}
    config = write_config(tree, tmp_path / "config.yaml")
    run_on_ranks(_run, 2, config, tmp_path, "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [c.progress.num_seen_steps for c in checkpoints_in(checkpoints)] == [3, 4]
    tree["settings"]["training_target"] = {"num_target_steps": 6, "num_target_tokens": 6 * 64}
    write_config(tree, config)
    run_on_ranks(_resume, 2, config, tmp_path, "run")
    assert [c.progress.num_seen_steps for c in checkpoints_in(checkpoints)] == [5, 6]
    assert len(list(checkpoints.iterdir())) == 3


def _resume(config: Path, root: Path, experiment_id: str) -> None:
    run(RunRequest(config, root, experiment_id, resume="auto"))


def _read_state_before_training(config: Path, root: Path, reads: bool) -> list[float]:
    recipe = _build(config, root)
    state: AppState = recipe.app_state
    model, batches = state.model_parts[0], recipe.train_dataloader.stream(0)
    losses = []
    for _ in range(3):
        if reads:
            state.state_dict()
        batch = next(batches)
        loss = recipe.loss_fn(model(batch.samples), batch.targets)
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("variant", ["adam", "adam_w"])
def test_reading_the_state_does_not_change_training(tmp_path: Path, variant: str) -> None:
    tree = tiny_config(tmp_path)
    tree["optimizer"]["variant_key"] = variant
    config = write_config(tree, tmp_path / "config.yaml")
    plain = run_on_ranks(_read_state_before_training, 2, config, tmp_path, False)
    assert run_on_ranks(_read_state_before_training, 2, config, tmp_path, True) == plain


def _load_twice(config: Path, root: Path, checkpoint: Path) -> None:
    app_state = _build(config, root).app_state
    DCPCheckpointLoading(dist.get_rank()).load_checkpoint_(app_state, checkpoint)
    with pytest.raises(CheckpointError, match="loaded into this app state already"):
        DCPCheckpointLoading(dist.get_rank()).load_checkpoint_(app_state, checkpoint)


def test_loading_twice_into_one_state_is_refused(trained: tuple[Path, Path], tmp_path: Path) -> None:
    config, checkpoints = trained
    run_on_ranks(_load_twice, 2, config, tmp_path, checkpoints_in(checkpoints)[0].path)


def _refused_load(config: Path, root: Path, checkpoint: Path) -> str:
    """The message, and the proof that nothing of the model was touched."""
    app_state = _build(config, root).app_state
    before = [p.detach().to_local().clone() for p in app_state.model_parts[0].parameters()]
    with pytest.raises(CheckpointError) as refusal:
        DCPCheckpointLoading(dist.get_rank()).load_checkpoint_(app_state, checkpoint)
    after = [p.detach().to_local() for p in app_state.model_parts[0].parameters()]
    assert all(map(torch.equal, before, after))
    return str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"n_layer": 3}, ["missing", r"transformer\.h\.2\."]),
        ({"n_layer": 1}, ["unexpected", r"transformer\.h\.1\."]),
        ({"vocab_size": 64}, ["shape", r"\(128, 16\) in the checkpoint, \(64, 16\) in the model"]),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_whole(
    trained: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], told: list[str]
) -> None:
    _, checkpoints = trained
    config = write_config(tiny_config(tmp_path, **changes), tmp_path / "config.yaml")
    for message in run_on_ranks(_refused_load, 2, config, tmp_path, checkpoints_in(checkpoints)[0].path):
        assert all(re.search(pattern, message) for pattern in told), message


class _Hostile:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.proof}",)


def test_hostile_metadata_runs_nothing(trained: tuple[Path, Path], tmp_path: Path) -> None:
    config, checkpoints = trained
    checkpoint = tmp_path / checkpoints_in(checkpoints)[0].path.name
    shutil.copytree(checkpoints_in(checkpoints)[0].path, checkpoint)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(_Hostile(tmp_path / "proof")))
    (checkpoint / "manifest.json").unlink()
    for message in run_on_ranks(_refused_load, 2, config, tmp_path, checkpoint):
        assert "not to be trusted" in message
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("damage", ["absent", "no metadata", "truncated data"])
def test_a_damaged_folder_is_told_on_all_ranks(trained: tuple[Path, Path], tmp_path: Path, damage: str) -> None:
    config, checkpoints = trained
    checkpoint = tmp_path / checkpoints_in(checkpoints)[0].path.name
    if damage != "absent":
        shutil.copytree(checkpoints_in(checkpoints)[0].path, checkpoint)
    if damage == "no metadata":
        (checkpoint / ".metadata").unlink()
    if damage == "truncated data":
        os.truncate(checkpoint / "__1_0.distcp", 100)
    for message in run_on_ranks(_any_refused_load, 2, config, tmp_path, checkpoint):
        assert checkpoint.name in message
        assert not message.rstrip().endswith(":")


def _any_refused_load(config: Path, root: Path, checkpoint: Path) -> str:
    with pytest.raises(CheckpointError) as refusal:
        DCPCheckpointLoading(dist.get_rank()).load_checkpoint_(_build(config, root).app_state, checkpoint)
    return str(refusal.value)


def _save_with_one_rank_failing(config: Path, root: Path, folder: Path) -> tuple[str, list[str]]:
    saving = DCPCheckpointSaving(folder, "x", dist.get_rank())
    app_state = _build(config, root).app_state
    saving.save_checkpoint(app_state, TrainingProgress(1, 64, 8, 512))
    if dist.get_rank() == 1:
        # this rank's files cannot grow further, as on a full disk; the ranks' own store, a file here, still can
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as failure:
        saving.save_checkpoint(app_state, TrainingProgress(2, 128, 8, 512))
    dist.barrier()
    return str(failure.value), sorted(path.name for path in folder.iterdir())


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_last_good_one(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    config, _ = trained
    folder = tmp_path / "checkpoints"
    outcomes = run_on_ranks(_save_with_one_rank_failing, 2, config, tmp_path, folder)
    for message, names in outcomes:
        assert "rank 1" in message
        assert "File too large" in message
        assert [name.startswith(".") for name in names] == [False, False]
    assert [c.progress.num_seen_steps for c in checkpoints_in(folder)] == [1]
    assert "seen_steps_1-" in (folder / "last_checkpoint_info.json").read_text()


def test_a_folder_that_cannot_be_made_is_told_on_all_ranks(trained: tuple[Path, Path], tmp_path: Path) -> None:
    config, _ = trained
    (tmp_path / "occupied").touch()
    for message in run_on_ranks(_refused_save, 2, config, tmp_path, tmp_path / "occupied" / "checkpoints"):
        assert "cannot write the checkpoint" in message


def _refused_save(config: Path, root: Path, folder: Path) -> str:
    saving = DCPCheckpointSaving(folder, "x", dist.get_rank())
    with pytest.raises(CheckpointError) as failure:
        saving.save_checkpoint(_build(config, root).app_state, TrainingProgress(1, 64, 8, 512))
    return str(failure.value)


def _load_fsdp1(config: Path, root: Path, model_file: Path, optimizer_file: Path) -> None:
    loaded = compose_config(ConfigRequest(Environment(config, root, "x")), GenerationRecipe)
    recipe = build(plan_of(loaded), GenerationRecipe)
    loading = FSDP1CheckpointLoading(
        dist.get_rank(), ["GPT2Block"], MixedPrecisionSettings.NO_MIXED_PRECISION, ShardingStrategy.FULL_SHARD
    )
    model = loading.load_model_checkpoint(recipe.model_raw, model_file)
    optimizer = torch.optim.AdamW(model.parameters())
    loading.load_optimizer_checkpoint_(optimizer, model, optimizer_file)
    saved, saved_optimizer = (torch.load(file, weights_only=True) for file in (model_file, optimizer_file))
    with torch.distributed.fsdp.FullyShardedDataParallel.summon_full_params(model):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, saved[name.replace("_fsdp_wrapped_module.", "")])
    assert {int(state["step"]) for state in optimizer.state.values()} == {8}
    full = full_optimizer_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        assert full["state"].keys() == saved_optimizer["state"].keys()
        for name, state in full["state"].items():
            assert all(torch.equal(state[key], saved_optimizer["state"][name][key]) for key in state)


def test_fsdp1_files_are_read_on_rank_zero_wrapped_and_scattered(tmp_path: Path) -> None:
    tree = tiny_config(tmp_path, wrapper="fsdp1")
    config = write_config(tree, tmp_path / "config.yaml")
    run_on_ranks(_run, 2, config, tmp_path, "run")
    checkpoint = checkpoints_in(tmp_path / "run" / "checkpoints")[-1]
    other = write_config(tiny_config(tmp_path, wrapper="fsdp1", seed=9), tmp_path / "other.yaml")
    run_on_ranks(_load_fsdp1, 2, other, tmp_path, checkpoint.path, checkpoint.optimizer_path)
    info = json.loads((tmp_path / "run" / "checkpoints" / "last_checkpoint_info.json").read_text())
    assert info == {
        "model_checkpoint_path": str(checkpoint.path),
        "optimizer_checkpoint_path": str(checkpoint.optimizer_path),
    }


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_resuming_goes_back_to_the_newest_whole_checkpoint(tmp_path: Path, wrapper: str) -> None:
    config = write_config(tiny_config(tmp_path, wrapper=wrapper, checkpointing_interval=2), tmp_path / "config.yaml")
    run_on_ranks(_run, 2, config, tmp_path, "run")
    saved = checkpoints_in(tmp_path / "run" / "checkpoints")
    expected = (tmp_path / "run" / "metrics.jsonl").read_text()
    for checkpoint, damaged in ((saved[-1], "data"), (saved[-2], "manifest")):
        data = checkpoint.path / "__0_0.distcp" if checkpoint.is_distributed else checkpoint.path
        file = data if damaged == "data" else checkpoint.manifest_path
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    run_on_ranks(_resume, 2, config, tmp_path, "run")
    last_lines = [text.splitlines()[-1] for text in (expected, (tmp_path / "run" / "metrics.jsonl").read_text())]
    losses = [json.loads(line)["losses"] for line in last_lines]
    assert losses[0] == losses[1]
    assert [c.progress.num_seen_steps for c in checkpoints_in(tmp_path / "run" / "checkpoints")] == [2, 4, 6, 8]


def _refused_full_files(folder: Path, checkpoint: Path, spoil: str) -> tuple[str, bool]:
    """What is told, and whether the model is as it was."""
    precision, strategy = MixedPrecisionSettings.NO_MIXED_PRECISION, ShardingStrategy.FULL_SHARD
    width = 5 if spoil == "shape" else 4
    model = shard_model(torch.nn.Sequential(torch.nn.Linear(4, width)), True, precision, strategy, ["Linear"])
    if spoil == "dtype":
        model = shard_model(
            torch.nn.Sequential(torch.nn.Linear(4, 4)).bfloat16(), True, precision, strategy, ["Linear"]
        )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    app_state = AppState(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(CheckpointError) as refusal:
        restore_(app_state, locate_checkpoint(checkpoint))
    return str(refusal.value), all(map(torch.equal, before, model.parameters()))


def _save_full_files(folder: Path) -> Path:
    precision, strategy = MixedPrecisionSettings.NO_MIXED_PRECISION, ShardingStrategy.FULL_SHARD
    model = shard_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), True, precision, strategy, ["Linear"])
    app_state = AppState(model, torch.optim.AdamW(model.parameters()))
    return FSDP1CheckpointSaving(folder, "x", dist.get_rank()).save_checkpoint(app_state, TrainingProgress(1, 1, 9, 9))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        ("dtype", "dtype       0.weight: float32 in the checkpoint, bfloat16 in the model"),
        ("shape", "shape       0.weight: (4, 4) in the checkpoint, (5, 4) in the model"),
    ],
)
def test_full_files_of_another_model_are_refused_whole(tmp_path: Path, spoil: str, told: str) -> None:
    checkpoint, _ = run_on_ranks(_save_full_files, 2, tmp_path)
    for message, is_untouched in run_on_ranks(_refused_full_files, 2, tmp_path, checkpoint, spoil):
        assert told in message
        assert is_untouched


def _load_verified(checkpoint: Path, verify: Level) -> str | None:
    precision, strategy = MixedPrecisionSettings.NO_MIXED_PRECISION, ShardingStrategy.FULL_SHARD
    loading = make_fsdp1_loading(dist.get_rank(), ["Linear"], precision, strategy, verify)
    try:
        loading.load_model_checkpoint(torch.nn.Sequential(torch.nn.Linear(4, 4)), checkpoint)
    except CheckpointError as error:
        return str(error)
    return None


def test_full_files_are_checked_as_thoroughly_as_asked(tmp_path: Path) -> None:
    checkpoint, _ = run_on_ranks(_save_full_files, 2, tmp_path)
    assert run_on_ranks(_load_verified, 2, checkpoint, "full") == [None, None]
    content = checkpoint.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    checkpoint.write_bytes(bytes(flipped))
    for message in run_on_ranks(_load_verified, 2, checkpoint, "full"):
        assert re.search("checksum [0-9a-f]{32} was written, [0-9a-f]{32} is found", message)
    assert run_on_ranks(_load_verified, 2, checkpoint, "sizes") == [None, None]
    checkpoint.write_bytes(content + bytes(1))
    for message in run_on_ranks(_load_verified, 2, checkpoint, "sizes"):
        assert f"has {len(content) + 1} bytes, {len(content)} were written" in message
