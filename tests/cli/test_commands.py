"""The command line: what each command prints, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from modalities.cli.main import main
from modalities.data.packed_file import open_tokens
from modalities.testing.tiny import tiny_config, write_config, write_tokens

REPOSITORY = Path(__file__).parents[2]
EXPERIMENTS = sorted(f for f in REPOSITORY.glob("config_files/training/*.yaml") if f.stem != "base")
OPTIONS = sorted(f for f in REPOSITORY.glob("config_files/*/*.yaml") if f.parent.name != "training")
Outcome = tuple[int, str, str]
Command = Callable[..., Outcome]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Calls the command in this process; gives its exit code, output and errors."""

    def call(*words: object) -> Outcome:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        output, errors = capsys.readouterr()
        assert "Traceback" not in output + errors
        code = ended.value.code
        assert isinstance(code, int)
        return code, output, errors

    return call


@pytest.mark.parametrize(
    "words", [["--help"], ["check", "--config", "config_files/training/quickstart.yaml"], ["components"]]
)
def test_light_commands_import_nothing_heavy(words: list[str]) -> None:
    program = (
        "import sys\nfrom modalities.cli.main import main\n"
        f"try: main({words!r})\nexcept SystemExit as ended: assert not ended.code, ended.code\n"
        "heavy = ('torch', 'numpy', 'transformers', 'wandb', 'tokenizers', 'rich')\n"
        "print('HEAVY', [name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["run"],
        ["warmstart"],
        ["check"],
        ["generate"],
        ["components"],
        ["data"],
        ["data", "create_raw_index"],
        ["data", "pack_encoded_data"],
    ],
)
def test_every_command_helps(command: Command, words: list[str]) -> None:
    code, output, _ = command(*words, "--help")
    assert code == 0
    assert "Usage: modalities" in output


def test_version(command: Command) -> None:
    assert command("--version")[1].startswith("modalities, version ")


def test_every_shipped_config_is_free_of_faults(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert len(EXPERIMENTS) > 1
    for config in EXPERIMENTS:
        assert len(config.read_text().splitlines()) <= 25
        code, output, errors = command("check", "--config", config.relative_to(REPOSITORY))
        assert (code, errors) == (0, "")
        assert "no faults" in output


NEEDS = {
    "data/packed": ["settings.paths.train_dataset_path=t.pbin", "settings.paths.heldout_dataset_path=t.pbin"],
    "parallel/hsdp": ["--world-size", "4"],
    "logging/wandb": ["evaluation_subscriber.project=mine"],
    "checkpoint_saving/fsdp1": ["parallel=fsdp1"],
}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_shipped_option_fits_the_quickstart(
    command: Command, option: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert option.read_text().startswith("#")
    group, name = option.parent.name, option.stem
    tokens = write_tokens(tmp_path / "t.pbin", 1000, 100)
    words = [str(word).replace("t.pbin", str(tokens)) for word in NEEDS.get(f"{group}/{name}", [])]
    plus = "+" if group == "precision" else ""
    code, _, errors = command("check", "--config", EXPERIMENTS[-1], *words, f"{plus}{group}={name}")
    assert (code, errors) == (0, "")


@pytest.mark.parametrize(
    "words",
    [
        ["rnu"],
        ["run"],
        ["run", "--config"],
        ["run", "--config", "x.yaml", "--nproc", "0"],
        ["data", "create_raw_index", "x", "--file_existence_policy", "maybe"],
    ],
)
def test_a_wrong_command_line_ends_with_two(command: Command, words: list[str]) -> None:
    assert command(*words)[0] == 2


@pytest.mark.parametrize("name", ["run", "check"])
def test_an_absent_config_is_told_with_its_neighbours(command: Command, tmp_path: Path, name: str) -> None:
    (tmp_path / "experiment.yaml").touch()
    code, _, errors = command(name, "--config", tmp_path / "experimnet.yaml")
    assert code == 2
    assert "no such config file" in errors
    assert "experiment.yaml" in errors


MISTAKES: dict[str, tuple[str, str, list[str]]] = {
    "syntax": ("settings:", "settings: [", ["yaml-syntax", "exp.yaml:"]),
    "component": ("variant_key: adam_w", "variant_key: adam_v", ["adam_v", "did you mean `adam_w`"]),
    "kind": ("component_key: optimizer", "component_key: optimiser", ["optimiser", "`optimizer`"]),
    "missing field": ("    eps: 1.0e-08\n", "", ["needs `eps`"]),
    "type": ("n_layer: 2", "n_layer: two", ["n_layer", "two", "int"]),
    "unknown field": ("    eps: 1.0e-08\n", "    epsilon: 1\n    eps: 1.0e-08\n", ["epsilon", "`eps`"]),
    "data file": ("train.pbin", "trian.pbin", ["trian.pbin", "no such file"]),
    "top level": ("gradient_clipper:\n", "gradient_cliper:\n", ["gradient_cliper", "gradient_clipper"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", ["run", "check"])
def test_a_mistake_is_told_by_place_and_nearest_name(command: Command, tmp_path: Path, mistake: str, name: str) -> None:
    old, new, told = MISTAKES[mistake]
    text = yaml.safe_dump(tiny_config(tmp_path), sort_keys=False)
    assert old in text
    config = tmp_path / "exp.yaml"
    config.write_text(text.replace(old, new, 1))
    code, _, errors = command(name, "--config", config, "--experiments_root_path", tmp_path / "runs")
    assert code == 2
    assert all(word in errors for word in told), errors
    assert "exp.yaml:" in errors
    assert not (tmp_path / "runs").exists()


def test_components_are_listed_and_shown(command: Command) -> None:
    assert "save_k_most_recent_checkpoints_strategy" in command("components")[1]
    code, output, _ = command("components", "optimizer", "adam_w")
    assert code == 0
    assert "weight_decay_groups_excluded" in output
    code, _, errors = command("components", "optimiser")
    assert code == 2
    assert "`optimizer`" in errors
    assert "`adam_w`" in command("components", "optimizer", "adamw")[2]


def test_a_component_of_one_s_own_is_known_by_import(command: Command, tmp_path: Path) -> None:
    module = tmp_path / "my_losses.py"
    module.write_text(
        "from modalities.registry.registry import register\n"
        "@register('loss', 'mine')\n"
        "def make(weight: float = 1.0) -> None:\n"
        '    """A loss of my own."""\n'
    )
    code, output, _ = command("components", "loss", "--import", module)
    assert code == 0
    assert "A loss of my own." in output
    code, _, errors = command("components", "--import", tmp_path / "absent.py")
    assert (code, "no such file" in errors) == (2, True)
    assert command("components", "--import", "no_such_module_anywhere")[0] == 2


def test_indexing_and_packing(command: Command, tmp_path: Path) -> None:
    source = tmp_path / "corpus.jsonl"
    source.write_text("".join(json.dumps({"body": {"text": text}}) + "\n" for text in ("It is a truth", "", "Emma")))
    code, output, _ = command("data", "create_raw_index", source)
    assert (code, output) == (0, f"{tmp_path / 'corpus.idx'}: 3 documents\n")
    assert command("data", "create_raw_index", source)[0] == 2
    assert command("data", "create_raw_index", source, "--file_existence_policy", "skip")[0] == 0
    tree: dict[str, Any] = {
        "settings": {
            "src_path": str(source),
            "dst_path": str(tmp_path / "corpus.pbin"),
            "index_path": str(tmp_path / "corpus.idx"),
            "jq_pattern": ".body.text",
            "num_cpus": "${node_env:num_cpus}",
            "eod_token": "<|endoftext|>",
            "processing_batch_size": 10,
            "raw_samples_queue_size": 300,
            "processed_samples_queue_size": 300,
        },
        "tokenizer": {
            "component_key": "tokenizer",
            "variant_key": "pretrained_hf_tokenizer",
            "config": {"pretrained_model_name_or_path": str(REPOSITORY / "tutorials" / "quickstart" / "tokenizer")},
        },
    }
    config = write_config(tree, tmp_path / "pack.yaml")
    code, output, _ = command("data", "pack_encoded_data", config)
    assert code == 0
    assert "2 documents" in output
    assert "1 empty documents left out (lines 2)" in output
    assert open_tokens(tmp_path / "corpus.pbin").tolist().count(0) == 2
    assert command("data", "pack_encoded_data", config)[0] == 2
    tree["settings"]["eod_token"] = "<end>"
    code, _, errors = command(
        "data", "pack_encoded_data", write_config(tree, config), "--file_existence_policy", "override"
    )
    assert code == 2
    assert "<end>" in errors


def test_debug_shows_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", "--config", str(tmp_path / "absent.yaml"), "--debug"])
    assert ended.value.code == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["absent", "empty"])
def test_generating_from_no_checkpoint_is_told(command: Command, tmp_path: Path, what: str) -> None:
    (tmp_path / "empty").mkdir()
    code, _, errors = command("generate", "--checkpoint", tmp_path / what, "--prompt", "x")
    assert code == 2
    assert what in errors
