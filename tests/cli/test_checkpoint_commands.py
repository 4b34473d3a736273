"""``modalities checkpoint`` as it is called: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modalities.checkpointing.discovery import checkpoints_in
from modalities.checkpointing.manifest import Start, read_manifest
from modalities.cli.main import main
from modalities.cli.output import as_size
from tests.checkpointing.samples import dcp_sample, flip_a_bit, fsdp1_sample, model_of

Outcome = tuple[int, str, str]
Command = Callable[..., Outcome]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Calls ``modalities checkpoint`` in this process; gives its exit code, output and errors."""

    def call(*words: object) -> Outcome:
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", *map(str, words)])
        output, errors = capsys.readouterr()
        assert "Traceback" not in output + errors
        code = ended.value.code
        assert isinstance(code, int)
        return code, output, errors

    return call


@pytest.fixture
def run_folder(tmp_path: Path, command: Command) -> Path:
    """A run's folder with good checkpoints at steps 1, 2 and 3, and the pointer."""
    for step in (1, 2, 3):
        assert command("adopt", dcp_sample(tmp_path / "checkpoints", step))[0] == 0
    assert command("repair", tmp_path)[0] == 0
    return tmp_path


def _steps(checkpoints: list[Any]) -> list[int]:
    return [checkpoint["progress"]["num_seen_steps"] for checkpoint in checkpoints]


def _at(run_folder: Path, step: int) -> Path:
    (path,) = run_folder.glob(f"checkpoints/eid_run-1-seen_steps_{step}-*")
    return path


@pytest.mark.parametrize("name", [None, "list", "inspect", "verify", "diff", "prune", "repair", "adopt", "convert"])
def test_every_command_helps(command: Command, name: str | None) -> None:
    code, output, _ = command(*([name] if name else []), "--help")
    assert code == 0
    assert "Usage: modalities checkpoint" in output


@pytest.mark.parametrize("words", [["--help"], ["list", "."], ["verify", "--level", "sizes", "."], ["repair", "."]])
def test_what_reads_no_tensors_imports_no_torch(run_folder: Path, words: list[str]) -> None:
    program = (
        "import sys\nfrom modalities.cli.main import main\n"
        f"try: main({['checkpoint', *words]!r})\nexcept SystemExit as ended: assert not ended.code, ended.code\n"
        "print('HEAVY', [name for name in ('torch', 'numpy', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=run_folder)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_list(command: Command, run_folder: Path) -> None:
    code, output, errors = command("list", run_folder)
    assert (code, errors) == (0, "")
    header, *rows, total = output.splitlines()
    assert header.split() == ["step", "tokens", "saved", "size", "world", "kind", "state"]
    assert [row.split()[:2] for row in rows] == [["1", "64"], ["2", "128"], ["3", "192"]]
    assert rows[-1].endswith("good (last)")
    assert total.startswith("3 checkpoints, ")
    (run_folder / "checkpoints" / f".tmp-{_at(run_folder, 1).name}").mkdir()
    (_at(run_folder, 2) / "__0_0.distcp").unlink()
    dcp_sample(run_folder / "checkpoints", 4)
    code, output, _ = command("list", run_folder)
    assert code == 1
    assert "damaged: __0_0.distcp: is missing" in output
    assert "unverified, no manifest" in output
    assert "left over: .tmp-" in output
    code, output, _ = command("list", run_folder, "--json")
    told = json.loads(output)
    assert code == 1
    assert [checkpoint["state"] for checkpoint in told["checkpoints"]] == ["good", "damaged", "good", "unverified"]
    assert len(told["leftovers"]) == 1


def test_a_pointer_to_nowhere_is_told_and_repaired(command: Command, run_folder: Path) -> None:
    _at(run_folder, 3).rename(run_folder / "elsewhere")
    code, _, errors = command("list", run_folder)
    assert code == 1
    assert "not there; `modalities checkpoint repair`" in errors
    assert command("repair", run_folder)[0] == 0
    assert command("list", run_folder)[0] == 0


def test_one_checkpoint_is_listed_from_inside_it(
    command: Command, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(_at(run_folder, 2))
    code, output, _ = command("list", ".")
    assert code == 0
    assert len(output.splitlines()) == 3


def test_a_run_that_keeps_its_checkpoints_elsewhere(command: Command, run_folder: Path) -> None:
    started = {"checkpoint_path": str(run_folder / "checkpoints"), "checkpoint_experiment_id": "run-1"}
    (run_folder / "run").mkdir()
    (run_folder / "run" / "run.json").write_text(json.dumps([started]))
    code, output, _ = command("list", run_folder / "run")
    assert code == 0
    assert output.splitlines()[-1].startswith("3 checkpoints")


def test_inspect(command: Command, run_folder: Path) -> None:
    code, output, _ = command("inspect", _at(run_folder, 2), "app.model.*", "--norms")
    assert code == 0
    assert "adopted_by" in output
    assert "num_seen_steps 2" in output
    assert "xxh3-128" in output
    norm = model_of(2)["block.weight"].double().norm().item()
    assert f"{norm:.6g}" in output
    assert output.splitlines()[-1].startswith("3 tensors, ")
    code, output, _ = command("inspect", run_folder, "--json")
    told = json.loads(output)
    assert told["progress"]["num_seen_steps"] == 3
    assert told["files"].keys() == {".metadata", "__0_0.distcp"}
    assert {"key": "app.model.head", "shape": [8], "dtype": "bfloat16", "bytes": 16} in told["keys"]
    code, _, errors = command("inspect", run_folder, "nothing-like-it")
    assert code == 2
    assert "no key matches" in errors


def test_inspect_of_full_files_and_of_foreign_folders(command: Command, tmp_path: Path) -> None:
    code, output, _ = command("inspect", fsdp1_sample(tmp_path, 1))
    assert code == 0
    assert "app.optimizer.state.block.weight.exp_avg" in output
    code, output, _ = command("inspect", dcp_sample(tmp_path, 2).rename(tmp_path / "stock"), "--norms", "--json")
    assert code == 0
    assert all("norm" in key for key in json.loads(output)["keys"])


def test_verify(command: Command, run_folder: Path) -> None:
    code, output, errors = command("verify", run_folder)
    assert (code, errors) == (0, "")
    assert output.count("good ") == 3
    flip_a_bit(_at(run_folder, 2) / "__0_0.distcp")
    assert command("verify", run_folder, "--level", "sizes")[0] == 0
    code, output, _ = command("verify", run_folder)
    assert code == 1
    assert "  __0_0.distcp: checksum " in output
    assert " was written, " in output
    assert command("verify", _at(run_folder, 3))[0] == 0
    code, output, _ = command("verify", _at(run_folder, 2), "--json")
    assert code == 1
    assert json.loads(output)["checkpoints"][0]["findings"][0]["file"] == "__0_0.distcp"


def test_verify_without_a_manifest(command: Command, tmp_path: Path) -> None:
    path = dcp_sample(tmp_path, 1)
    code, output, errors = command("verify", path)
    assert code == 0
    assert output.startswith("unverified")
    assert f"`modalities checkpoint adopt {path}`" in errors
    (path / "__0_0.distcp").unlink()
    code, output, _ = command("verify", path)
    assert code == 1
    assert "__0_0.distcp: is missing" in output


def test_diff(command: Command, tmp_path: Path) -> None:
    model = model_of(0)
    a, same = dcp_sample(tmp_path / "a", 1, model), fsdp1_sample(tmp_path / "b", 1, model)
    assert command("diff", a, same) == (0, "9 equal\n", "")
    assert command("diff", a, same, "--all")[1].count("equal") == 10
    other = {**model, "head": torch.zeros(8, dtype=torch.bfloat16)}
    code, output, _ = command("diff", a, dcp_sample(tmp_path / "c", 1, other))
    assert code == 1
    assert "app.model.head " in output
    assert output.splitlines()[-1] == "7 equal, 2 of other values"
    code, output, _ = command("diff", tmp_path / "c", a, "--json")
    told = json.loads(output)
    assert told["counts"] == {"equal": 7, "values": 2}
    # the norm of A is 0: not a finite number
    assert told["differences"][0]["relative"] is None


def test_diff_of_a_damaged_checkpoint(command: Command, run_folder: Path) -> None:
    (_at(run_folder, 2) / "__0_0.distcp").write_bytes(b"short")
    code, _, errors = command("diff", _at(run_folder, 1), _at(run_folder, 2))
    assert code == 1
    assert "__0_0.distcp" in errors


def test_prune(command: Command, run_folder: Path) -> None:
    code, output, _ = command("prune", run_folder, "--keep", 1, "--dry-run", "--json")
    told = json.loads(output)
    assert code == 0
    assert _steps(told["kept"]) == [3]
    assert _steps(told["deleted"]) == [2, 1]
    assert len(list((run_folder / "checkpoints").glob("eid_*"))) == 3
    flip_a_bit(_at(run_folder, 3) / "__0_0.distcp")
    code, output, _ = command("prune", run_folder, "--keep", 1)
    assert code == 0
    assert "--damaged deletes it" in output
    assert "1 checkpoint, " in output
    assert " freed" in output
    assert sorted(path.name.split("-")[2] for path in run_folder.glob("checkpoints/eid_*")) == [
        "seen_steps_2",
        "seen_steps_3",
    ]
    code, output, errors = command("prune", run_folder, "--keep", 1, "--damaged")
    assert code == 0
    assert "checkpoint repair" in errors
    assert [path.name for path in run_folder.glob("checkpoints/eid_*")] == [_at(run_folder, 2).name]


def test_repair_tells_what_it_skips(command: Command, run_folder: Path) -> None:
    flip_a_bit(_at(run_folder, 3) / ".metadata")
    code, output, _ = command("repair", run_folder)
    assert code == 0
    skipped, done = output.splitlines()
    assert "seen_steps_3" in skipped
    assert ".metadata: checksum" in skipped
    assert done.endswith(str(_at(run_folder, 2)))
    for step in (1, 2):
        (_at(run_folder, step) / "manifest.json").unlink()
    code, output, errors = command("repair", run_folder)
    assert code == 1
    assert "unverified, no manifest; `modalities checkpoint adopt` writes one" in output
    assert "is as it was" in errors


def test_adopt(command: Command, tmp_path: Path) -> None:
    model = fsdp1_sample(tmp_path, 1)
    code, output, _ = command("adopt", model, "--json")
    assert code == 0
    assert json.loads(output)["kind"] == "fsdp1"
    code, _, errors = command("adopt", model)
    assert code == 2
    assert "exists already" in errors
    code, _, errors = command("adopt", dcp_sample(tmp_path, 2, hook=Exception("code")))
    assert code == 1
    assert "is not adopted" in errors
    code, _, errors = command("adopt", dcp_sample(tmp_path, 3).rename(tmp_path / "stock"))
    assert code == 2
    assert "rename it to eid_{experiment_id}-seen_steps_" in errors


@pytest.mark.parametrize(
    "words",
    [
        ["list", "absent"],
        ["list", "empty"],
        ["list", "file"],
        ["inspect", "absent"],
        ["inspect", "empty"],
        ["inspect", "file"],
        ["verify", "absent"],
        ["verify", "empty"],
        ["diff", "absent", "empty"],
        ["diff", "file", "file"],
        ["prune", "empty", "--keep", "1"],
        ["prune", ".", "--keep", "0"],
        ["repair", "empty"],
        ["adopt", "absent"],
        ["adopt", "file"],
    ],
)
def test_mistakes_are_told_in_one_message(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no checkpoint")
    code, output, errors = command(*words)
    assert (code, output) == (2, "")
    assert errors.lower().count("error") == 1


def test_what_needs_a_folder_refuses_one_checkpoint(command: Command, run_folder: Path) -> None:
    for words in (["prune", _at(run_folder, 1), "--keep", 1], ["repair", _at(run_folder, 1)]):
        code, _, errors = command(*words)
        assert code == 2
        assert "is one checkpoint" in errors


def test_a_terminal_gets_a_table(run_folder: Path) -> None:
    primary, secondary = pty.openpty()
    words = [sys.executable, "-m", "modalities", "checkpoint", "list", str(run_folder)]
    with subprocess.Popen(words, stdout=secondary, stderr=secondary, env=os.environ | {"TERM": "xterm"}) as process:
        os.close(secondary)
        output = b""
        try:
            while chunk := os.read(primary, 4096):
                output += chunk
        except OSError:
            pass  # Linux ends a terminal this way
        assert process.wait() == 0
    os.close(primary)
    assert "─" in output.decode()
    assert "good (last)" in output.decode()


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_950, "1.0 MB"), (2.5e12, "2.5 TB")]
)
def test_sizes_in_words(num_bytes: int, text: str) -> None:
    assert as_size(num_bytes) == text


def test_a_store_that_cannot_be_reached_is_told(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    code, _, errors = command("list", "s3://no-such-bucket-here/checkpoints")
    assert code == 2
    assert errors.startswith("error: the store of objects answers: ")
    assert len(errors.splitlines()) == 1


def test_a_history_that_the_run_left_is_neither_chosen_nor_deleted(command: Command, tmp_path: Path) -> None:
    """Steps 1 to 4, then sent back to step 1 and saved at step 2 anew."""
    for step, start in ((1, Start(1, 0)), (3, Start(1, 0)), (4, Start(1, 0)), (2, Start(2, 1, 1))):
        path = dcp_sample(tmp_path, step)
        assert command("adopt", path)[0] == 0
        manifest = read_manifest(path / "manifest.json")
        assert manifest is not None
        (path / "manifest.json").write_bytes(replace(manifest, start=start).to_bytes())
    assert command("repair", tmp_path)[0] == 0
    assert "seen_steps_2-" in (tmp_path / "last_checkpoint_info.json").read_text()
    code, output, _ = command("prune", tmp_path, "--keep", 1, "--json")
    assert code == 0
    assert [c.progress.num_seen_steps for c in checkpoints_in(tmp_path)] == [2, 3, 4]
    assert "gone back behind it" in output
