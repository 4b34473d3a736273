"""What lies on disk: found, judged, adopted, pruned."""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path

import pytest

from modalities.checkpointing.adoption import adopt, check_without_manifest, checkpoint_to_adopt, repair
from modalities.checkpointing.catalogue import Entry, catalogue_of, entry_at, open_catalogue, prove
from modalities.checkpointing.manifest import read_manifest
from modalities.checkpointing.paths import checkpoint_name
from modalities.checkpointing.pruning import delete, plan_pruning
from modalities.checkpointing.resume_state import ResumeState, resume_state_bytes
from modalities.exceptions import CheckpointError
from modalities.progress import TrainingProgress
from tests.checkpointing.samples import dcp_sample, flip_a_bit, fsdp1_sample, progress_at


def _adopted(path: Path) -> Path:
    adopt(checkpoint_to_adopt(path))
    return path


def _entry(path: Path) -> Entry:
    entry = entry_at(path)
    assert entry is not None
    return entry


def _steps(entries: list[Entry]) -> list[int]:
    return [entry.progress.num_seen_steps for entry in entries]


def test_each_kind_is_found_and_judged(tmp_path: Path) -> None:
    _adopted(dcp_sample(tmp_path, 9))
    _adopted(fsdp1_sample(tmp_path, 10))
    dcp_sample(tmp_path, 100)
    fsdp1_sample(tmp_path, 101)
    found = catalogue_of(tmp_path).entries
    assert _steps(list(found)) == [9, 10, 100, 101]
    assert [entry.kind for entry in found] == ["dcp", "fsdp1"] * 2
    assert [entry.state for entry in found] == ["good", "good", "unverified", "unverified"]
    assert open_catalogue(tmp_path).num_bytes == sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())


def test_what_structure_tells(tmp_path: Path) -> None:
    missing, short, manifest, unindexed, modelless = (dcp_sample(tmp_path, step) for step in (1, 2, 3, 4, 5))
    for path in (missing, short, manifest):
        _adopted(path)
    (missing / ".metadata").unlink()
    with (short / "__0_0.distcp").open("ab") as file:
        file.write(b"x")
    flip_a_bit(manifest / "manifest.json")
    (unindexed / ".metadata").unlink()
    modelless = _adopted(fsdp1_sample(tmp_path, 6))
    modelless.unlink()
    verdicts = {entry.checkpoint.path: entry.verdict for entry in catalogue_of(tmp_path).entries}
    assert verdicts[missing] == "damaged: .metadata: is missing"
    assert "__0_0.distcp: has " in verdicts[short]
    assert "checksum" in verdicts[manifest] or "not as it was written" in verdicts[manifest]
    assert "and so is the manifest" in verdicts[unindexed]
    assert verdicts[modelless] == f"damaged: {modelless.name}: is missing"


def test_a_manifest_of_a_newer_version_is_not_called_damaged(tmp_path: Path) -> None:
    path = _adopted(dcp_sample(tmp_path, 1))
    manifest = read_manifest(path / "manifest.json")
    assert manifest is not None
    object.__setattr__(manifest, "format_version", 99)
    (path / "manifest.json").write_bytes(manifest.to_bytes())
    entry = _entry(path)
    assert entry.state == "unreadable"
    assert "update modalities" in entry.verdict
    plan = plan_pruning([entry], 1, with_damaged=True, prove=prove)
    assert not plan.deleted


def test_ranks_are_counted_by_their_files(tmp_path: Path) -> None:
    path = dcp_sample(tmp_path, 1)
    for name in ("__0_1.distcp", "__1_0.distcp", "__10_0.distcp", "other.distcp"):
        (path / name).touch()
    assert _entry(path).world_size == 3


def test_leftovers_and_the_pointer_are_told(tmp_path: Path) -> None:
    path = _adopted(dcp_sample(tmp_path / "checkpoints", 1))
    folder = path.parent
    for prefix in (".tmp-", ".trash-", ".superseded-"):
        (folder / f"{prefix}{path.name}").mkdir()
        (folder / f"{prefix}{path.name}" / "data").write_bytes(b"12345")
    (folder / checkpoint_name("run-1", progress_at(2), "optimizer")).write_bytes(b"123")
    (folder / "last_checkpoint_info.json").write_text(json.dumps({"checkpoint_folder_path": str(path)}))
    found = open_catalogue(tmp_path)
    assert [leftover.num_bytes for leftover in found.leftovers] == [5, 5, 5, 3]
    assert found.entries[0].is_last
    assert found.pointer is not None
    assert found.pointer.problem is None


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"checkpoint_folder_path": 3}', '{"model_checkpoint_path": "/no"}']
)
def test_a_bad_pointer_is_told(tmp_path: Path, content: str) -> None:
    dcp_sample(tmp_path, 1)
    (tmp_path / "last_checkpoint_info.json").write_text(content)
    pointer = catalogue_of(tmp_path).pointer
    assert pointer is not None
    assert pointer.problem


def test_one_checkpoint_is_looked_at_alone(tmp_path: Path) -> None:
    fsdp1_sample(tmp_path, 1)
    model = fsdp1_sample(tmp_path, 2)
    for entity in ("model", "optimizer"):
        found = open_catalogue(tmp_path / checkpoint_name("run-1", progress_at(2), entity))
        assert [entry.checkpoint.path for entry in found.entries] == [model]
        assert found.is_of_one


@pytest.mark.parametrize("make", [dcp_sample, fsdp1_sample])
def test_an_adopted_checkpoint_is_described_and_holds(tmp_path: Path, make: object) -> None:
    path = make(tmp_path, 3)  # type: ignore[operator]
    checkpoint = checkpoint_to_adopt(path)
    resume_state = ResumeState(TrainingProgress(3, 192, 100, 6400, num_seen_samples=12), [], [])
    checkpoint.resume_state_path.write_bytes(resume_state_bytes(resume_state))
    manifest = adopt(checkpoint)
    assert read_manifest(checkpoint.manifest_path) == manifest
    assert manifest.progress.num_seen_samples == 12
    assert manifest.world_size == 1
    assert manifest.versions.keys() == {"adopted_by"}
    assert time.strptime(manifest.saved_at, "%Y-%m-%dT%H:%M:%S%z")
    own = "app.model.block.weight" if path.is_dir() else "block.weight"
    assert manifest.tensors[own].shape == [16, 8]
    assert manifest.tensors[own].dtype == "float32"
    assert checkpoint.resume_state_path.name in manifest.files
    assert prove(_entry(path)).state == "good"
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoint_to_adopt(path)


@pytest.mark.parametrize("make", [dcp_sample, fsdp1_sample])
def test_more_than_plain_values_is_refused(tmp_path: Path, make: object) -> None:
    path = make(tmp_path, 3, hook=Exception("code"))  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=r"plain value|cannot be read"):
        adopt(checkpoint_to_adopt(path))
    assert _entry(path).state == "unverified"


def test_a_resume_state_of_another_step_is_refused(tmp_path: Path) -> None:
    path = dcp_sample(tmp_path, 3)
    (path / "resume_state.pt").write_bytes(resume_state_bytes(ResumeState(progress_at(4), [], [])))
    with pytest.raises(CheckpointError, match="seen_steps_4"):
        adopt(checkpoint_to_adopt(path))


def test_what_cannot_be_adopted_is_told(tmp_path: Path) -> None:
    misnamed = dcp_sample(tmp_path, 1).rename(tmp_path / "step1")
    lone = fsdp1_sample(tmp_path, 2)
    (tmp_path / checkpoint_name("run-1", progress_at(2), "optimizer")).unlink()
    (tmp_path / "weights.bin").touch()
    for path, told in (
        (misnamed, "rename it to eid_"),
        (lone, "half a checkpoint"),
        (tmp_path / "weights.bin", "rename it to eid_"),
        (tmp_path, "no .metadata"),
        (tmp_path / "absent", "no such checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=told):
            checkpoint_to_adopt(path)


def test_structure_without_a_manifest(tmp_path: Path) -> None:
    path = dcp_sample(tmp_path, 1)
    checkpoint = _entry(path).checkpoint
    assert check_without_manifest(checkpoint) == []
    data = path / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-10])
    assert "bytes, .metadata names" in str(check_without_manifest(checkpoint)[0])
    data.unlink()
    assert str(check_without_manifest(checkpoint)[0]) == "__0_0.distcp: is missing"
    (path / ".metadata").write_bytes(b"nonsense")
    assert "damaged" in str(check_without_manifest(checkpoint)[0])
    model = fsdp1_sample(tmp_path, 2)
    model.write_bytes(b"nonsense")
    assert "cannot be read" in str(check_without_manifest(_entry(model).checkpoint)[0])


def test_proof_names_each_bad_file_with_both_checksums(tmp_path: Path) -> None:
    path = _adopted(dcp_sample(tmp_path, 1))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    for name in ("__0_0.distcp", ".metadata"):
        for position in (0, len(before[name]) // 3, len(before[name]) - 1):
            flip_a_bit(path / name, position)
            (finding,) = prove(_entry(path)).findings
            assert finding.file == name
            assert "was written" in finding.problem
            (path / name).write_bytes(before[name])
    (path / ".metadata").write_bytes(b"short")
    (finding,) = prove(_entry(path)).findings
    assert "has 5 bytes" in finding.problem
    assert "checksum" in finding.problem


def test_the_pointer_is_repaired_to_the_newest_that_is_proven(tmp_path: Path) -> None:
    good = _adopted(fsdp1_sample(tmp_path, 1))
    rotten = _adopted(dcp_sample(tmp_path, 2))
    flip_a_bit(rotten / "__0_0.distcp")
    dcp_sample(tmp_path, 3)
    done = repair(catalogue_of(tmp_path))
    assert _steps(done.skipped) == [3, 2]
    assert json.loads((tmp_path / "last_checkpoint_info.json").read_text()) == {
        "model_checkpoint_path": str(good.absolute()),
        "optimizer_checkpoint_path": str(good.absolute()).replace("-model-", "-optimizer-"),
    }
    assert catalogue_of(tmp_path).entries[0].is_last
    good.unlink()
    assert repair(catalogue_of(tmp_path)).chosen is None


def test_pruning_keeps_the_newest_good_ones_of_each_experiment(tmp_path: Path) -> None:
    for experiment_id in ("run-1", "run-2"):
        for step in (1, 2, 3):
            _adopted(dcp_sample(tmp_path, step, experiment_id=experiment_id))
    rotten = tmp_path / checkpoint_name("run-1", progress_at(3))
    flip_a_bit(rotten / "__0_0.distcp")
    dcp_sample(tmp_path, 4)
    plan = plan_pruning(catalogue_of(tmp_path).entries, 1, with_damaged=False, prove=prove)
    assert _steps(plan.kept) == [2, 3]
    assert _steps(plan.deleted) == [1, 2, 1]
    assert sorted(_steps([entry for entry, _ in plan.left])) == [3, 4]
    with_damaged = plan_pruning(catalogue_of(tmp_path).entries, 1, with_damaged=True, prove=prove)
    assert rotten in [entry.checkpoint.path for entry in with_damaged.deleted]
    assert all(delete(entry) for entry in with_damaged.deleted)
    assert _steps(list(catalogue_of(tmp_path).entries)) == [2, 3, 4]
    assert not catalogue_of(tmp_path).leftovers


def test_no_damaged_one_goes_where_no_good_one_remains(tmp_path: Path) -> None:
    flip_a_bit(_adopted(dcp_sample(tmp_path, 1)) / "__0_0.distcp")
    plan = plan_pruning(catalogue_of(tmp_path).entries, 1, with_damaged=True, prove=prove)
    assert not plan.deleted
    assert "no good one" in plan.left[0][1]


def test_all_files_of_an_fsdp1_checkpoint_go(tmp_path: Path) -> None:
    path = _adopted(fsdp1_sample(tmp_path, 1))
    assert delete(_entry(path))
    assert list(tmp_path.iterdir()) == []


class _Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, ("hostile-was-here",))


def test_code_in_metadata_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = dcp_sample(tmp_path, 1)
    (path / ".metadata").write_bytes(pickle.dumps(_Hostile()))
    (finding,) = check_without_manifest(_entry(path).checkpoint)
    assert "not to be trusted" in finding.problem
    assert not Path("hostile-was-here").exists()
