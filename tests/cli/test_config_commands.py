"""The commands that show, compare, explain and upgrade a config, as they are called."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from modalities.testing.tiny import write_tokens
from tests.faults.cases import BASE

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "train.pbin", 1000, 128)
    (tmp_path / "exp.yaml").write_text(BASE)
    return tmp_path


def _call(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modalities", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | environment)


def test_show_and_show_of_show(folder: Path) -> None:
    shown = _call(folder, "config", "show", "--config", "exp.yaml", "optimizer.lr=0.5")
    assert (shown.returncode, shown.stderr) == (0, "")
    (folder / "shown.yaml").write_text(shown.stdout)
    assert _call(folder, "config", "show", "--config", "shown.yaml").stdout == shown.stdout
    short = _call(folder, "config", "show", "--short", "--config", "shown.yaml").stdout
    assert len(short) < len(shown.stdout)
    (folder / "short.yaml").write_text(short)
    same = _call(folder, "config", "diff", "shown.yaml", "short.yaml")
    assert (same.returncode, same.stdout) == (0, "")
    assert "# exp.yaml:" in _call(folder, "config", "show", "--provenance", "--config", "exp.yaml").stdout


def test_diff_tells_and_exits_with_one(folder: Path) -> None:
    (folder / "other.yaml").write_text(BASE.replace("lr: 0.01", "lr: 0.02"))
    told = _call(folder, "config", "diff", "exp.yaml", "other.yaml")
    assert told.returncode == 1
    assert told.stdout == "~ optimizer.lr: 0.01 (exp.yaml:64:9) -> 0.02 (other.yaml:64:9)\n"


def test_a_config_with_faults_is_not_shown(folder: Path) -> None:
    for words in (["show"], ["graph"], ["show", "--short"]):
        refused = _call(folder, "config", *words, "--config", "exp.yaml", "optimizer.lr=${nowhere}")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "points nowhere" in refused.stderr


def test_graph_schema_and_explain(folder: Path) -> None:
    assert _call(folder, "config", "graph", "--config", "exp.yaml").stdout.startswith("flowchart TD\n")
    assert _call(folder, "config", "graph", "--config", "exp.yaml", "--format", "dot").stdout.startswith("digraph")
    assert json.loads(_call(folder, "config", "schema").stdout)["title"] == "modalities"
    assert "tokenizer" in json.loads(_call(folder, "config", "schema", "--for", "packing").stdout)["properties"]
    assert "did you mean `packing`" in _call(folder, "config", "schema", "--for", "paking").stderr
    told = _call(folder, "config", "explain", "optimizer.lr", "--config", "exp.yaml", "optimizer.lr=0.5")
    assert "set by    override `optimizer.lr=0.5`" in told.stdout
    refused = _call(folder, "config", "explain", "optimizer.lrr", "--config", "exp.yaml")
    assert (refused.returncode, "did you mean `lr`" in refused.stderr) == (2, True)


def test_upgrade_prints_or_writes(folder: Path) -> None:
    printed = _call(folder, "config", "upgrade", "exp.yaml")
    assert printed.returncode == 0
    assert "config:\n    lr" not in printed.stdout
    assert (folder / "exp.yaml").read_text() == BASE
    written = _call(folder, "config", "upgrade", "exp.yaml", "--write")
    assert (written.returncode, written.stdout) == (0, "")
    assert (folder / "exp.yaml").read_text() == printed.stdout


def test_check_for_programs(folder: Path) -> None:
    fine = _call(folder, "check", "--config", "exp.yaml", "--format", "json")
    assert json.loads(fine.stdout) == {"config": "exp.yaml", "ok": True, "faults": []}
    told = _call(folder, "check", "--config", "exp.yaml", "--format", "json", "optimizer.lrr=1", "optimizer.lr=x")
    assert told.returncode == 2
    faults = json.loads(told.stdout)["faults"]
    assert [(f["code"], f["severity"], f["path"]) for f in faults] == [
        ("override-no-target", "error", "optimizer.config.lrr"),
        ("bad-value", "error", "optimizer.config.lr"),
    ]
    assert faults[0]["origin"] == "override `optimizer.lrr=1`"
    (folder / "broken.yaml").write_text("a: [\n")
    told = _call(folder, "check", "--config", "broken.yaml", "--format", "json")
    assert told.returncode == 2
    (fault,) = json.loads(told.stdout)["faults"]
    assert (fault["file"], fault["line"], fault["code"]) == ("broken.yaml", 2, "yaml-syntax")


def test_check_for_a_world_and_a_kind(folder: Path) -> None:
    word = "device_mesh.data_parallel_shard_degree=8"
    assert "--world-size 8" in _call(folder, "check", "--config", "exp.yaml", word).stderr
    profile = "step_profile.dp_degree=8", "training_target.num_target_tokens=2048"
    assert _call(folder, "check", "--config", "exp.yaml", word, *profile, "--world-size", "8").returncode == 0
    refused = _call(folder, "check", "--config", "exp.yaml", "--as", "trainin")
    assert (refused.returncode, "did you mean `training`" in refused.stderr) == (2, True)
    assert "src_path" in _call(folder, "check", "--config", "exp.yaml", "--as", "packing").stderr


def test_what_a_file_is_for_is_told_from_its_entries(folder: Path) -> None:
    (folder / "text.jsonl").write_text('{"text": "a"}\n')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pack.yaml").write_text(
        "settings: {src_path: text.jsonl, eod_token: x}\n"
        "tokenizer: {variant_key: pretrained_hf_tokenizer, pretrained_model_name_or_path: .}\n"
    )
    assert "(packing config); 1 component would" in _call(folder, "check", "--config", "pack.yaml").stdout
    (folder / "parts.yaml").write_text(
        "part: {component_key: loss, variant_key: clm_cross_entropy_loss, target_key: a, prediction_key: b}\n"
    )
    assert "(components config); 1 component would" in _call(folder, "check", "--config", "parts.yaml").stdout


def _on_a_terminal(folder: Path, *words: str, **environment: str) -> str:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "modalities", *words]
    process = subprocess.Popen(command, cwd=folder, stdout=theirs, stderr=theirs, env=os.environ | environment)
    os.close(theirs)
    output = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        output += chunk
    process.wait()
    os.close(ours)
    return output.decode()


def test_colours_on_a_terminal_only(folder: Path) -> None:
    words = ("check", "--config", "exp.yaml", "optimizer.lrr=1")
    assert "\x1b[1;31merror[override-no-target]" in _on_a_terminal(folder, *words)
    assert "\x1b[" not in _on_a_terminal(folder, *words, NO_COLOR="1")
    assert "\x1b[" not in _call(folder, *words).stderr


def test_overrides_of_other_commands(folder: Path) -> None:
    (folder / "text.jsonl").write_text('{"text": "a b"}\n')
    tokenizer = REPOSITORY / "tutorials" / "quickstart" / "tokenizer"
    (folder / "pack.yaml").write_text(
        "settings: {src_path: text.jsonl, eod_token: <|endoftext|>}\n"
        f"tokenizer: {{variant_key: pretrained_hf_tokenizer, pretrained_model_name_or_path: {tokenizer}}}\n"
    )
    packed = _call(folder, "data", "pack_encoded_data", "pack.yaml", "settings.dst_path=mine.pbin")
    assert packed.returncode == 0, packed.stderr
    assert (folder / "mine.pbin").is_file()
    refused = _call(folder, "data", "pack_encoded_data", "pack.yaml", "settings.dst_pat=mine.pbin")
    assert (refused.returncode, "`settings.dst_path`" in refused.stderr) == (2, True)
