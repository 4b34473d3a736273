"""Every kind of checkpoint becomes every other one, bit for bit, and stock readers read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from modalities.checkpointing.adoption import adopt, checkpoint_to_adopt
from modalities.checkpointing.conversion.converting import Conversion, convert, target_of
from modalities.checkpointing.conversion.safetensors_writing import DEFAULT_MAX_SHARD_BYTES
from modalities.checkpointing.manifest import read_manifest
from modalities.checkpointing.reading.sources import open_source
from modalities.cli.output import byte_progress
from modalities.exceptions import CheckpointError, DamagedCheckpoint
from tests.checkpointing.samples import dcp_sample, flip_a_bit, fsdp1_sample, model_of


def converted(source: Path, out: Path, to: str | None = None, dtype: torch.dtype | None = None, **options: int) -> Path:
    return conversion(source, out, to, dtype, **options).output


def conversion(
    source: Path, out: Path, to: str | None = None, dtype: torch.dtype | None = None, **options: int
) -> Conversion:
    max_shard_bytes = options.get("max_shard_bytes", DEFAULT_MAX_SHARD_BYTES)
    return convert(source, out, target_of(out, to), dtype, max_shard_bytes, byte_progress)


def content(path: Path, prefix: str = "app.") -> dict[str, Any]:
    source = open_source(path)
    return {key: source.read(key) for key in source.forms if key.startswith(prefix)}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        return bool(a == b)

    return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)


def sample_model(*, is_tied: bool) -> dict[str, Tensor]:
    model = {**model_of(1), "step": torch.tensor(3), "mask": torch.ones(5, dtype=torch.bool), "none": torch.empty(0, 4)}
    model["embedding"] = torch.randn(131, 8)
    if is_tied:
        model["lm_head"] = model["embedding"]
    return model


EDGES = [("a.bin", None), ("a.pt", None), ("a.safetensors", None), ("shards", "safetensors"), ("dcp", "dcp")]


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("source_kind", ["dcp", "fsdp1"])
@pytest.mark.parametrize(("name", "to"), EDGES)
def test_weights_go_there_and_back(tmp_path: Path, name: str, to: str | None, source_kind: str, is_tied: bool) -> None:
    make = dcp_sample if source_kind == "dcp" else fsdp1_sample
    source = make(tmp_path / "source", 1, sample_model(is_tied=is_tied))
    weights = content(source, "app.model.")
    there = converted(source, tmp_path / name, to, max_shard_bytes=2000)
    assert same(content(there, "app.model."), weights)
    for number, (back, back_to) in enumerate(EDGES):
        again = converted(there, tmp_path / f"{number}{back}", back_to, max_shard_bytes=3000)
        assert same(content(again, "app.model."), weights)


def test_an_optimizer_goes_from_dcp_to_fsdp1_and_back(tmp_path: Path) -> None:
    source = dcp_sample(tmp_path / "a", 1, sample_model(is_tied=False))
    full = converted(source, tmp_path / "b", "fsdp1")
    back = converted(full, tmp_path / "c", "dcp")
    assert back.name == source.name
    assert same(content(full), content(source))
    assert same(content(back), content(source))


def test_the_groups_of_an_optimizer_come_back(tmp_path: Path) -> None:
    model = fsdp1_sample(tmp_path / "a", 1)
    optimizer = Path(str(model).replace("-model-", "-optimizer-"))
    stored = torch.load(optimizer, weights_only=True)
    # two groups that are equal but for their names, in another order than the model's
    names = list(model_of(1))
    stored["param_groups"] = [{"params": names[2:], "lr": 0.1}, {"params": names[:2], "lr": 0.1}]
    torch.save(stored, optimizer)
    back = converted(converted(model, tmp_path / "b", "dcp"), tmp_path / "c", "fsdp1")
    again = torch.load(str(back).replace("-model-", "-optimizer-"), weights_only=True)
    assert again["param_groups"] == stored["param_groups"]
    assert same(again["state"]["head"], stored["state"]["head"])


def test_stock_readers_read_the_output(tmp_path: Path) -> None:
    model = sample_model(is_tied=True)
    source = fsdp1_sample(tmp_path, 1, model)
    full = torch.load(converted(source, tmp_path / "x.bin"), weights_only=True)
    assert same(full, model)
    assert full["lm_head"].data_ptr() == full["embedding"].data_ptr()
    stored = load_file(converted(source, tmp_path / "x.safetensors"))
    assert same(stored, {name: tensor for name, tensor in model.items() if name != "lm_head"})
    shards = converted(source, tmp_path / "shards", "safetensors", max_shard_bytes=1000)
    files = sorted(shards.glob("model-*.safetensors"))
    assert len(files) > 1
    assert same({key: value for file in files for key, value in load_file(file).items()}, stored)
    state = {"app": {"model": {name: torch.zeros_like(tensor) for name, tensor in model.items()}}}
    dcp.load(state, checkpoint_id=converted(source, tmp_path / "y", "dcp"), no_dist=True)
    assert same(state["app"]["model"], model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_another_type_is_that_of_the_floating_point_weights_only(tmp_path: Path, dtype: torch.dtype) -> None:
    model = sample_model(is_tied=True)
    source = dcp_sample(tmp_path, 1, model)
    done = conversion(source, tmp_path / "out", "dcp", dtype)
    expected = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in model.items()}
    assert same(content(done.output, "app.model."), {f"app.model.{name}": tensor for name, tensor in expected.items()})
    assert same(content(done.output, "app.optimizer."), content(source, "app.optimizer."))
    assert any("--dtype changed the model only" in note for note in done.notes)


def test_frequencies_of_rotary_embeddings_are_not_rounded(tmp_path: Path) -> None:
    model = {"attn.weight": torch.rand(4, 4), "attn.qkv_transforms.0.inv_freq": torch.rand(8)}
    torch.save(model, tmp_path / "x.bin")
    out = load_file(converted(tmp_path / "x.bin", tmp_path / "y.safetensors", None, torch.bfloat16))
    assert same(out, {**model, "attn.weight": model["attn.weight"].bfloat16()})


def test_a_number_too_large_for_the_type_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    model = {"fine": torch.tensor([torch.inf, torch.nan]), "large": torch.tensor([1.0, 1e6])}
    torch.save(model, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=r"app\.model\.large.*1e\+06.*infinite in float16"):
        converted(tmp_path / "x.bin", tmp_path / "y.safetensors", None, torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]
    assert converted(tmp_path / "x.bin", tmp_path / "y.safetensors", None, torch.bfloat16).is_file()


def test_weights_alone_make_a_dcp_folder_and_say_so_but_no_fsdp1_checkpoint(tmp_path: Path) -> None:
    torch.save(model_of(1), tmp_path / "weights.bin")
    done = conversion(tmp_path / "weights.bin", tmp_path / "out", "dcp")
    assert any("weights only" in note for note in done.notes)
    with pytest.raises(CheckpointError, match="no optimizer state"):
        converted(tmp_path / "weights.bin", tmp_path / "out", "fsdp1")


def test_experiment_and_progress_come_through_safetensors(tmp_path: Path) -> None:
    source = dcp_sample(tmp_path / "a", 3)
    back = converted(converted(source, tmp_path / "x.safetensors"), tmp_path / "b", "dcp")
    assert back.name == source.name


def test_the_manifest_tells_the_files_of_both_sides(tmp_path: Path) -> None:
    source = dcp_sample(tmp_path / "a", 1)
    adopted = adopt(checkpoint_to_adopt(source))
    done = conversion(source, tmp_path / "b", "dcp")
    manifest = read_manifest(done.output / "manifest.json")
    assert manifest is not None
    assert manifest.origin is not None
    assert manifest.origin.files == done.source_files == adopted.files
    assert manifest.files == done.files
    assert done.is_proven


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_a_damaged_source_is_refused(tmp_path: Path, file: str) -> None:
    source = dcp_sample(tmp_path / "a", 1)
    adopt(checkpoint_to_adopt(source))
    flip_a_bit(source / file)
    with pytest.raises(DamagedCheckpoint, match="damaged"):
        converted(source, tmp_path / "x.bin")
    assert not (tmp_path / "x.bin").exists()


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
def test_keys_of_wrappers_are_clean_afterwards(tmp_path: Path, prefix: str) -> None:
    def wrapped(name: str) -> str:
        inner = name.replace("block.", "block._checkpoint_wrapped_module._fsdp_wrapped_module.")
        return f"{prefix}{inner}"

    model = model_of(1)
    clean = fsdp1_sample(tmp_path / "a", 1, model)
    old = fsdp1_sample(tmp_path / "b", 1, {wrapped(name): tensor for name, tensor in model.items()})
    assert same(content(converted(old, tmp_path / "c", "dcp")), content(clean))
    assert same(content(converted(old, tmp_path / "d", "fsdp1")), content(clean))
    assert list(torch.load(converted(old, tmp_path / "x.bin"), weights_only=True)) == list(model)


def test_weights_that_happen_to_be_constant_or_stepped_are_not_tied(tmp_path: Path) -> None:
    equal = torch.randn(4, 4)
    model = {"a": torch.ones(4, 4), "b": torch.ones(4, 4), "c": equal, "d": equal.clone()}
    source = dcp_sample(tmp_path, 1, model)  # the optimizer knows all of them
    stored = load_file(converted(source, tmp_path / "x.safetensors"))
    assert sorted(stored) == ["a", "b", "c", "d"]


def test_nothing_is_written_into_a_checkpoint(tmp_path: Path) -> None:
    source = dcp_sample(tmp_path, 1, sample_model(is_tied=False))
    before = sorted(source.rglob("*"))
    for out, target in ((source, "dcp"), (source / "in" / "it", "fsdp1"), (source / "x.bin", None)):
        with pytest.raises(CheckpointError, match="lies in a checkpoint"):
            converted(source, out, target)
    assert sorted(source.rglob("*")) == before
