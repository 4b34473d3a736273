"""Loading a part of a checkpoint, and what is refused unless asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.discovery import checkpoints_in
from modalities.checkpointing.fsdp.fsdp_checkpoint_loading import DCPCheckpointLoading
from modalities.checkpointing.fsdp.fsdp_checkpoint_saving import DCPCheckpointSaving
from modalities.checkpointing.reading.load_planner import LoadingOptions
from modalities.exceptions import CheckpointError
from modalities.progress import TrainingProgress


def _app_state(value: float, dtype: torch.dtype = torch.float32, num_classes: int = 3) -> AppState:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, num_classes)).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return AppState(model, torch.optim.AdamW(model.parameters()))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    saved = _app_state(1)
    saved.model(torch.ones(1, 4)).sum().backward()
    saved.optimizer.step()
    for parameter in saved.model.parameters():
        torch.nn.init.constant_(parameter, 1)
    DCPCheckpointSaving(tmp_path, "x", 0).save_checkpoint(saved, TrainingProgress(1, 1, 9, 9))
    return checkpoints_in(tmp_path)[0].path


def _load(app_state: AppState, checkpoint: Path, options: LoadingOptions) -> list[list[float]]:
    loading = DCPCheckpointLoading(0)
    loading.options = options
    loading.load_checkpoint_(app_state, checkpoint)
    return [parameter.detach().unique().tolist() for parameter in app_state.model.parameters()]


def test_another_dtype_is_an_error_unless_asked_for(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"dtype +app\.model\.0\.weight: float32 in the checkpoint, bfloat16"):
        _load(_app_state(0, torch.bfloat16), checkpoint, LoadingOptions())
    assert _load(_app_state(0, torch.bfloat16), checkpoint, LoadingOptions(allow_cast=True)) == [[1.0]] * 4


def test_a_new_head_keeps_its_own_weights(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"shape +app\.model\.1\.weight: \(3, 4\) in the checkpoint, \(5, 4\)"):
        _load(_app_state(0, num_classes=5), checkpoint, LoadingOptions(strict=False))
    options = LoadingOptions(exclude=["model.1.*", "optimizer.state.1.*"])
    assert _load(_app_state(0, num_classes=5), checkpoint, options) == [[1.0], [1.0], [0.0], [0.0]]


def test_only_what_is_included_is_loaded(checkpoint: Path) -> None:
    app_state = _app_state(0)
    assert _load(app_state, checkpoint, LoadingOptions(include=["model.0.*"])) == [[1.0], [1.0], [0.0], [0.0]]
    assert {float(state["step"]) for state in app_state.optimizer.state.values()} <= {0.0}


def test_keys_that_one_side_lacks_are_told_unless_that_is_fine(checkpoint: Path) -> None:
    bigger = _app_state(0)
    bigger.model.append(torch.nn.Linear(3, 3))
    bigger.optimizer = torch.optim.AdamW(bigger.model.parameters())
    with pytest.raises(CheckpointError, match=r"missing +app\.model\.2\.weight") as refusal:
        _load(bigger, checkpoint, LoadingOptions())
    assert "strict: false" in str(refusal.value)
    again = _app_state(0)
    again.model.append(torch.nn.Linear(3, 3))
    again.optimizer = torch.optim.AdamW(again.model.parameters())
    assert _load(again, checkpoint, LoadingOptions(strict=False))[:4] == [[1.0]] * 4


def test_a_newer_format_is_refused_by_name(checkpoint: Path) -> None:
    import json

    import xxhash

    manifest = checkpoint / "manifest.json"
    fields = json.loads(manifest.read_text())
    del fields["checksum"]
    fields["format_version"] = 999
    text = json.dumps(fields, indent=1)
    fields["checksum"] = xxhash.xxh3_128_hexdigest(text.encode())
    manifest.write_text(json.dumps(fields, indent=1) + "\n")
    with pytest.raises(CheckpointError, match=r"has format 999, .*update modalities"):
        _load(_app_state(0), checkpoint, LoadingOptions())


def test_a_pattern_that_matches_nothing_is_refused(checkpoint: Path) -> None:
    for options in (LoadingOptions(include=["modle.*"]), LoadingOptions(exclude=["optimiser.*"], strict=False)):
        with pytest.raises(CheckpointError, match=r"no key matches the pattern `(modle|optimiser)\.\*`"):
            _load(_app_state(0), checkpoint, options)
