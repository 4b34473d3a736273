"""``modalities checkpoint export-hf`` and ``import-hf`` as they are called: real runs, real processes, real kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from modalities.checkpointing.discovery import checkpoints_in
from modalities.data.tokenizers import PreTrainedHFTokenizer
from modalities.testing.tiny import component, read_tensors, tiny_config, write_config

REPOSITORY = Path(__file__).parents[2]
TOKENIZER = REPOSITORY / "tutorials" / "quickstart" / "tokenizer"
PROMPT = "It is a truth"

Outcome = subprocess.CompletedProcess[str]


def call(*words: object, program: list[str] | None = None) -> Outcome:
    command = [sys.executable, *(program or ["-m", "modalities"]), *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert "Traceback" not in done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on two ranks, with tied weights and a tokenizer whose file adds a token to each text."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    content = json.loads((TOKENIZER / "tokenizer.json").read_text())
    token = content["added_tokens"][0]["content"]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {token: {"id": token, "ids": [0], "tokens": [token]}},
    }
    (tokenizer / "tokenizer.json").write_text(json.dumps(content))
    (tokenizer / "tokenizer_config.json").write_bytes((TOKENIZER / "tokenizer_config.json").read_bytes())
    config = tiny_config(folder, vocab_size=4101, num_steps=3, checkpointing_interval=3, use_weight_tying=True)
    config["tokenizer"] = component(
        "tokenizer",
        "pretrained_hf_tokenizer",
        pretrained_model_name_or_path=str(tokenizer),
        special_tokens={"pad_token": "<pad>"},
    )
    words = ["--nproc", 2, "--experiments_root_path", folder, "--experiment_id", "one"]
    done = call("run", "--config", write_config(config, folder / "tiny.yaml"), *words)
    assert done.returncode == 0, done.stderr
    return folder / "one"


def generated(run: Path) -> str:
    done = call("generate", "--checkpoint", run, "--prompt", PROMPT, "--max-new-tokens", 6, "--temperature", 0)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_of_two_ranks_goes_to_transformers_and_comes_back(run_folder: Path, tmp_path: Path) -> None:
    done = call("checkpoint", "export-hf", run_folder, tmp_path / "hf", "--max-shard-size", "100kB")
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM" in done.stdout
    assert "logits equal to transformers' within" in done.stdout
    assert (tmp_path / "hf" / "README.md").read_text().startswith("---\nlibrary_name: transformers\n")
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == 0

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    own = PreTrainedHFTokenizer(str(TOKENIZER))
    assert tokenizer(PROMPT)["input_ids"] == own.tokenize(PROMPT)
    assert tokenizer.pad_token_id == 4096
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    expected = generated(run_folder)
    for use_cache in (True, False):
        mask = torch.ones_like(ids)
        found = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, use_cache=use_cache)
        assert tokenizer.decode(found[0]) + "\n" == expected

    done = call("checkpoint", "import-hf", tmp_path / "hf", tmp_path / "back")
    assert done.returncode == 0, done.stderr
    assert generated(tmp_path / "back") == expected
    assert call("checkpoint", "verify", tmp_path / "back").returncode == 0
    (before,), (after,) = (checkpoints_in(run / "checkpoints") for run in (run_folder, tmp_path / "back"))
    assert after.progress.num_seen_steps == 0
    tensors = {key: x for key, x in read_tensors(before.path).items() if key.startswith("app.model.")}
    back = read_tensors(after.path)
    assert tensors.keys() == back.keys()
    for key, tensor in tensors.items():
        assert torch.equal(tensor.view(torch.int32), back[key].view(torch.int32)), key


def test_what_is_there_is_not_overwritten(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    for words in (["export-hf", run_folder], ["import-hf", run_folder]):
        done = call("checkpoint", *words, tmp_path / "mine", "--no-verify")
        assert done.returncode == 2
    assert (tmp_path / "mine").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_kill_leaves_nothing_under_the_final_name(run_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "modalities", "checkpoint", "export-hf", str(run_folder), str(tmp_path / "hf")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / ".tmp-hf" / "config.json").is_file():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-hf"]
    assert call("checkpoint", "export-hf", run_folder, tmp_path / "hf", "--no-verify").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


WITHOUT_TRANSFORMERS = """
import importlib.machinery, sys
find = importlib.machinery.PathFinder.find_spec
class Hidden(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "transformers" else find(name, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Hidden
from modalities.cli.main import main
main()
"""
"""A fresh interpreter that looks for packages as always, and does not find this one."""


def test_without_transformers_the_command_tells_what_to_install(run_folder: Path, tmp_path: Path) -> None:
    program = ["-c", WITHOUT_TRANSFORMERS]
    done = call("checkpoint", "export-hf", run_folder, tmp_path / "hf", program=program)
    assert done.returncode == 2
    assert 'pip install "modalities[hf]"' in done.stderr
    assert list(tmp_path.iterdir()) == []
    done = call("checkpoint", "export-hf", run_folder, tmp_path / "hf", "--no-verify", program=program)
    assert done.returncode == 0, done.stderr
    assert "not compared" in done.stdout
    done = call("checkpoint", "import-hf", tmp_path / "hf", tmp_path / "back", "--no-verify", program=program)
    assert done.returncode == 0, done.stderr
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf") is not None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["export-hf", "RUN", "OUT", "--max-shard-size", "much"], "is no size; write 5GB"),
        (["export-hf", "RUN", "OUT", "model_raw.poe_type=ABSOLUTE"], "model_raw.poe_type is ABSOLUTE; it needs NOPE"),
        (["export-hf", "RUN", "OUT", "--tokenizer", "absent"], "no tokenizer at absent"),
        (["export-hf", "RUN", "OUT", "~tokenizer"], "name a folder with a tokenizer.json by --tokenizer"),
        (["export-hf", "absent", "OUT"], "no such checkpoint or run folder"),
        (["import-hf", "absent", "OUT"], "it has no config.json"),
    ],
)
def test_mistakes_are_told_in_one_message(run_folder: Path, tmp_path: Path, words: list[Any], told: str) -> None:
    places = {"RUN": run_folder, "OUT": tmp_path / "out"}
    done = call("checkpoint", *(places.get(word, word) for word in words))
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert list(tmp_path.iterdir()) == []
