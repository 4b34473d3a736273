"""Looking into checkpoints one tensor at a time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from modalities.checkpointing import comparison
from modalities.checkpointing.comparison import Difference, compare, l2_norm, matching, sections_left_out
from modalities.checkpointing.reading.sources import Form, open_source
from modalities.exceptions import CheckpointError, DamagedCheckpoint
from tests.checkpointing.samples import dcp_sample, flip_a_bit, fsdp1_sample, model_of


def _differences(a: Path, b: Path) -> dict[str, Difference]:
    return {d.key: d for d in compare(open_source(a), open_source(b)) if d.status != "equal"}


def test_both_kinds_give_the_same_tensors_under_the_same_keys(tmp_path: Path) -> None:
    folder, file = open_source(dcp_sample(tmp_path, 1)), open_source(fsdp1_sample(tmp_path, 1))
    assert folder.forms == file.forms
    for key, form in folder.forms.items():
        if form is not None:
            assert torch.equal(folder.read(key), file.read(key))
    assert folder.forms["app.model.head"] == Form((8,), "bfloat16", 16)
    assert {d.status for d in compare(folder, file)} == {"equal"}


def test_what_differs_is_told_by_number(tmp_path: Path) -> None:
    model = model_of(0)
    other = {name: tensor.clone() for name, tensor in model.items()}
    other["block.weight"][3, 4] += 0.5
    found = _differences(dcp_sample(tmp_path / "a", 1, model), fsdp1_sample(tmp_path / "b", 1, other))
    assert found.keys() == {"app.model.block.weight", "app.optimizer.state.block.weight.exp_avg"}
    difference = found["app.model.block.weight"]
    assert difference.status == "values"
    assert difference.max_abs == pytest.approx(0.5)
    norm = model["block.weight"].double().norm().item()
    assert difference.relative == pytest.approx(0.5 / norm)


def test_what_is_missing_or_of_another_form_is_told(tmp_path: Path) -> None:
    model = model_of(0)
    other = {"head": model["head"].float(), "block.weight": model["block.weight"].T.contiguous(), "new": torch.ones(1)}
    found = _differences(dcp_sample(tmp_path / "a", 1, model), dcp_sample(tmp_path / "b", 1, other, extra=3))
    statuses = {key: difference.status for key, difference in found.items()}
    assert statuses["app.model.block.bias"] == "only in A"
    assert statuses["app.model.new"] == "only in B"
    assert statuses["app.model.block.weight"] == "shape"
    assert statuses["app.model.head"] == "dtype"
    assert statuses["app.extra"] == "only in B"


def test_values_that_are_no_tensors_are_compared(tmp_path: Path) -> None:
    a = dcp_sample(tmp_path / "a", 1, scheduler={"last": 3, "undefined": math.nan, "list": [1, 2]})
    b = dcp_sample(tmp_path / "b", 1, scheduler={"last": 4, "undefined": math.nan, "list": [1, 2]})
    found = _differences(a, b)
    assert [(key, difference.note) for key, difference in found.items()] == [("app.scheduler.last", "3 / 4")]


def test_full_files_may_lack_the_optimizer(tmp_path: Path) -> None:
    folder, file = dcp_sample(tmp_path, 1), fsdp1_sample(tmp_path, 1)
    lone = file.rename(tmp_path / "weights.bin")
    sources = open_source(folder), open_source(lone)
    assert sections_left_out(*sources) == ["optimizer"]
    assert {difference.status for difference in compare(*sources)} == {"equal"}
    assert _differences(folder, lone) == {}


@pytest.mark.parametrize(
    ("one", "other", "max_abs", "relative"),
    [
        ([0.0, 1.0], [-0.0, 1.0], 0.0, 0.0),
        ([math.inf, 1.0], [math.inf, 2.0], 1.0, 0.0),
        ([math.nan], [1.0], math.nan, math.nan),
        ([0.0], [2.0], 2.0, math.inf),
    ],
)
def test_odd_numbers(tmp_path: Path, one: list[float], other: list[float], max_abs: float, relative: float) -> None:
    files = []
    for name, values in (("a", one), ("b", other)):
        torch.save({"x": torch.tensor(values)}, tmp_path / name)
        files.append(tmp_path / name)
    (difference,) = _differences(*files).values()
    assert difference.max_abs == pytest.approx(max_abs, nan_ok=True)
    assert difference.relative == pytest.approx(relative, nan_ok=True)
    assert _differences(files[0], files[0]) == {}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.arange(10),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.complex64) * (3 + 4j),
        torch.randn(40, 3).to(torch.float8_e4m3fn),
    ],
)
def test_norms_and_equality_of_any_type(tmp_path: Path, tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_BLOCK_ELEMENTS", 7)
    exact = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    assert l2_norm(tensor) == pytest.approx(exact.double().norm().item())
    torch.save({"x": tensor}, tmp_path / "a")
    assert _differences(tmp_path / "a", tmp_path / "a") == {}


def test_keys_are_chosen_by_part_or_pattern() -> None:
    keys = ["app.model.a", "app.model.b", "app.optimizer.state.a.step"]
    assert matching(keys, None) == keys
    assert matching(keys, "model") == keys[:2]
    assert matching(keys, "*.a") == keys[:1]
    with pytest.raises(CheckpointError, match=r"did you mean `app\.model\.a`"):
        matching(keys, "app.modle.a")


def test_a_folder_of_any_name_is_read_but_no_optimizer_file_alone(tmp_path: Path) -> None:
    folder = dcp_sample(tmp_path, 1).rename(tmp_path / "stock")
    assert "app.model.head" in open_source(folder).forms
    optimizer = fsdp1_sample(tmp_path, 1).name.replace("-model-", "-optimizer-")
    with pytest.raises(CheckpointError, match="give its model file"):
        open_source(tmp_path / optimizer)


def test_damage_is_told_with_its_place(tmp_path: Path) -> None:
    folder, file = dcp_sample(tmp_path, 1), fsdp1_sample(tmp_path, 1)
    source = open_source(folder)
    (folder / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(DamagedCheckpoint, match=r"__0_0\.distcp"):
        source.read("app.model.head")
    flip_a_bit(folder / ".metadata", 0)
    with pytest.raises(DamagedCheckpoint, match=r"\.metadata"):
        open_source(folder)
    file.write_bytes(b"short")
    with pytest.raises(DamagedCheckpoint, match="cannot be read"):
        open_source(file)
