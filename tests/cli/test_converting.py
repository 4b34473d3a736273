"""``modalities checkpoint convert`` as it is called."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from modalities.checkpointing.discovery import checkpoints_in
from modalities.checkpointing.reading.sources import open_source
from modalities.cli.main import main
from modalities.run import RunRequest, run
from modalities.testing.ranks import run_on_ranks
from modalities.testing.tiny import tiny_config, write_config
from tests.checkpointing.samples import dcp_sample, fsdp1_sample


def _call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", *map(str, words)])
    output, errors = capsys.readouterr()
    assert "Traceback" not in output + errors
    assert isinstance(ended.value.code, int)
    return ended.value.code, output, errors


def test_what_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = dcp_sample(tmp_path / "a", 1)
    code, output, errors = _call(capsys, "convert", source, tmp_path / "b", "--to", "dcp")
    final = tmp_path / "b" / source.name
    assert code == 0
    assert output.splitlines()[-1] == f"dcp: {final}"
    assert "no manifest" in errors
    assert _call(capsys, "verify", final)[0] == 0
    assert _call(capsys, "diff", source, final)[0] == 0
    code, output, errors = _call(capsys, "convert", final, tmp_path / "x.safetensors", "--json", "--dtype", "bfloat16")
    told = json.loads(output)
    assert (code, errors) == (0, "")
    assert told["is_proven"]
    assert told["kind"] == "safetensors"
    assert told["files"]["x.safetensors"]["size"] == (tmp_path / "x.safetensors").stat().st_size
    assert told["source_files"]["__0_0.distcp"]["xxh3_128"]
    code, output, _ = _call(capsys, "inspect", tmp_path / "x.safetensors")
    assert code == 0
    assert "app.model.block.weight" in output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["out"], "add --to dcp, fsdp1 or safetensors"),
        (["out", "--to", "bin"], "must end in"),
        (["out.bin", "--to", "dcp"], "rename it"),
        (["there.bin"], "exists already"),
        (["out", "--to", "safetensors", "--max-shard-size", "many"], "is no size"),
    ],
)
def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    source = fsdp1_sample(tmp_path / "a", 1)
    (tmp_path / "there.bin").write_bytes(b"mine")
    code, _, errors = _call(capsys, "convert", source, tmp_path / words[0], *words[1:])
    assert code == 2
    assert told.replace("must end in", "end in") in errors
    assert (tmp_path / "there.bin").read_bytes() == b"mine"
    assert not (tmp_path / "out").exists()


def test_an_output_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = fsdp1_sample(tmp_path / "a", 1)
    for target in ("dcp", "fsdp1"):
        assert _call(capsys, "convert", source, tmp_path / target, "--to", target)[0] == 0
        code, _, errors = _call(capsys, "convert", source, tmp_path / target, "--to", target)
        assert code == 2
        assert "exists already" in errors


_SLOW = """
import sys, time
from modalities.checkpointing.saving import checksummed_file
put = checksummed_file.ChecksummedFile._put
def slow(self, block):
    print("WRITING", flush=True)
    time.sleep(0.2)
    put(self, block)
checksummed_file.ChecksummedFile._put = slow
from modalities.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize(("name", "to"), [("x.bin", "bin"), ("x", "dcp"), ("x", "safetensors")])
def test_stopped_in_the_middle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sent: signal.Signals, name: str, to: str
) -> None:
    model = {f"weight_{index}": torch.randn(256, 256) for index in range(30)}
    source = dcp_sample(tmp_path / "a", 1, model)
    words = ["checkpoint", "convert", str(source), str(tmp_path / "out" / name), "--to", to]
    with subprocess.Popen(
        [sys.executable, "-c", _SLOW, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"WRITING\n"
        time.sleep(0.3)
        process.send_signal(sent)
        assert process.wait(30) != 0
    found = [path.name for path in (tmp_path / "out").rglob("*") if ".tmp-" not in str(path) and path.name != name]
    assert found == []
    if sent == signal.SIGINT:
        assert not (tmp_path / "out").exists()
    # what a killed one left is in nobody's way
    assert _call(capsys, *words[1:])[0] == 0
    assert [path.name for path in (tmp_path / "out").rglob(".tmp-*")] == []


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    source = dcp_sample(tmp_path / "a", 1, {"weight": torch.randn(512, 512)})
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))\n"
    limited += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    program = f"{limited}import sys\nfrom modalities.cli.main import main\nmain(sys.argv[1:])"
    words = ["checkpoint", "convert", str(source), str(tmp_path / "out" / "x.bin")]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    assert "cannot write" in done.stderr
    assert "File too large" in done.stderr
    assert not (tmp_path / "out").exists()


def _run(config: Path, root: Path, experiment_id: str, resume: str = "none") -> None:
    run(RunRequest(config, root, experiment_id, resume))


def _losses(root: Path, experiment_id: str) -> list[dict[str, Any]]:
    results = [json.loads(line) for line in (root / experiment_id / "metrics.jsonl").read_text().splitlines()]
    return [
        {**result, "throughput_metrics": result["throughput_metrics"].get("lr mean")}
        for result in results
        if result["num_train_steps_done"] > 4
    ]


def _tensors(root: Path, experiment_id: str) -> dict[str, torch.Tensor]:
    source = open_source(checkpoints_in(root / experiment_id / "checkpoints")[-1].path)
    return {key: source.read(key) for key, form in source.forms.items() if form is not None}


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# torch's own, of a DCP folder that is loaded into an FSDP1 model
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*_get_pg_default_device", "ignore:Multiple backends")
@pytest.mark.parametrize(("wrapper", "to"), [("fsdp1", "dcp"), ("fsdp2", "fsdp1")])
def test_a_run_goes_on_from_the_converted_as_from_the_original(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrapper: str, to: str
) -> None:
    tree = tiny_config(tmp_path, wrapper=wrapper, vocab_size=131, use_weight_tying=True, dropout=0.3)
    config = write_config(tree, tmp_path / "config.yaml")
    run_on_ranks(_run, 2, config, tmp_path, "unbroken")
    halfway = checkpoints_in(tmp_path / "unbroken" / "checkpoints")[0]
    assert _call(capsys, "convert", halfway.path, tmp_path / "converted", "--to", to)[0] == 0
    (converted,) = checkpoints_in(tmp_path / "converted")
    original, made = open_source(halfway.path), open_source(converted.path)
    keys = [key for key, form in original.forms.items() if form is not None]
    assert all(torch.equal(original.read(key), made.read(key)) for key in keys)
    run_on_ranks(_run, 2, config, tmp_path, "resumed", str(converted.path))
    assert _losses(tmp_path, "resumed") == _losses(tmp_path, "unbroken")
    assert _equal(_tensors(tmp_path, "resumed"), _tensors(tmp_path, "unbroken"))


def test_an_fsdp1_checkpoint_goes_on_under_fsdp2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = {
        wrapper: write_config(tiny_config(tmp_path, wrapper=wrapper, vocab_size=131), tmp_path / f"{wrapper}.yaml")
        for wrapper in ("fsdp1", "fsdp2")
    }
    run_on_ranks(_run, 2, configs["fsdp1"], tmp_path, "unbroken")
    halfway = checkpoints_in(tmp_path / "unbroken" / "checkpoints")[0]
    assert _call(capsys, "convert", halfway.path, tmp_path / "converted", "--to", "dcp")[0] == 0
    run_on_ranks(_run, 2, configs["fsdp2"], tmp_path, "resumed", str(checkpoints_in(tmp_path / "converted")[0].path))
    expected, got = _tensors(tmp_path, "unbroken"), _tensors(tmp_path, "resumed")
    assert expected.keys() <= got.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(got[key], tensor)
