"""Defaults lists and groups, as Hydra users expect, every value with the file that it stands in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modalities.composition.compose import ComposedConfig
from modalities.exceptions import ConfigError
from modalities.run import RunRequest, compose, plan_of
from modalities.testing.tiny import write_tokens
from tests.faults.cases import BASE

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file of the present folder, which has `base.yaml` and data already."""
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "train.pbin", 1000, 128)

    def written(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    written("base.yaml", BASE)
    return written


def _composed(*words: str, **request: Any) -> ComposedConfig:
    return compose(RunRequest(Path("exp.yaml"), experiment_id="run-1", overrides=words, **request))


def _value(composed: ComposedConfig, *path: str) -> tuple[Any, str]:
    node = composed.tree.get(path)
    assert node is not None
    return node.plain(), str(node.place)


def test_a_config_builds_on_another(write: Write) -> None:
    write("exp.yaml", "defaults: [base, _self_]\noptimizer: {lr: 0.5}\n")
    composed = _composed()
    assert not plan_of(composed).errors
    assert _value(composed, "optimizer", "config", "lr") == (0.5, "exp.yaml:2:17")
    assert _value(composed, "optimizer", "config", "eps") == (1e-8, "base.yaml:66:10")
    assert [file.name for file in composed.files] == ["exp.yaml", "base.yaml"]


def test_self_first_means_that_the_others_win(write: Write) -> None:
    write("exp.yaml", "defaults: [_self_, base]\nmodel_raw: {n_layer: 7}\n")
    assert _value(_composed(), "model_raw", "config", "n_layer") == (2, "base.yaml:33:12")


def test_one_s_own_groups_come_before_the_shipped_ones(write: Write) -> None:
    write("optimizer/adam_w.yaml", "variant_key: adam_w\nlr: 0.25\n")
    write("optimizer/fast.yaml", "variant_key: adam\nlr: 1.0\nbetas: [0.5, 0.5]\n")
    write("exp.yaml", "defaults:\n  - base\n  - override optimizer: fast\n  - _self_\n")
    with pytest.raises(ConfigError, match="cannot be composed"):
        _composed()  # base.yaml has no group `optimizer` to override
    write("exp.yaml", "defaults:\n  - base\n  - optimizer: fast\n  - _self_\n")
    assert _value(_composed(), "optimizer", "config", "lr") == (1.0, "optimizer/fast.yaml:2:5")
    assert _value(_composed("optimizer=adam_w"), "optimizer", "config", "lr") == (0.25, "optimizer/adam_w.yaml:2:5")
    # the whole option is replaced, and what base.yaml says stays below it
    assert _value(_composed("optimizer=adam_w"), "optimizer", "config", "betas")[0] == [0.9, 0.95]


def test_groups_of_a_further_folder(write: Write, tmp_path: Path) -> None:
    write("elsewhere/optimizer/slow.yaml", "lr: 0.125\n")
    write("exp.yaml", "defaults:\n  - base\n  - optimizer: slow\n  - _self_\n")
    with pytest.raises(ConfigError, match="no option `slow`"):
        _composed()
    assert _value(_composed(config_folders=(Path("elsewhere"),)), "optimizer", "config", "lr")[0] == 0.125


def test_shipped_groups_and_registered_variants_are_options(write: Write) -> None:
    write("exp.yaml", "defaults:\n  - base\n  - checkpoint_saving: none\n  - progress_subscriber: rich\n  - _self_\n")
    composed = _composed()
    assert composed.tree.plain()["checkpoint_saving"]["config"]["k"] == 0
    assert composed.tree.plain()["progress_subscriber"]["variant_key"] == "rich"
    assert not plan_of(_composed("progress_subscriber=dummy")).errors


def test_forms_may_differ_between_files(write: Write) -> None:
    """`base.yaml` has `config:`, the next file has not, the third has it again, and names no component."""
    write("middle.yaml", "defaults: [base, _self_]\noptimizer: {lr: 0.5, eps: 1e-4}\n")
    write(
        "exp.yaml", "defaults: [middle, _self_]\noptimizer: {config: {lr: 0.25}}\nmodel_raw: {config: {n_layer: 3}}\n"
    )
    composed = _composed()
    assert not plan_of(composed).errors
    assert _value(composed, "optimizer", "config", "lr") == (0.25, "exp.yaml:2:26")
    assert _value(composed, "optimizer", "config", "eps") == (1e-4, "middle.yaml:2:27")
    assert _value(composed, "optimizer", "config", "weight_decay")[0] == 0.1
    assert _value(composed, "model_raw", "config", "n_layer")[0] == 3
    write(
        "exp.yaml", "defaults: [base, _self_]\nmfu_calculator: {variant_key: gpt2, n_layer: 2, config: {n_embd: 16}}\n"
    )
    assert [fault.code for fault in plan_of(_composed()).errors] == ["mixed-form"]


def test_the_options_of_a_group_can_be_listed(write: Write) -> None:
    from modalities.composition.defaults_list import options_of
    from modalities.composition.schema import Schema
    from modalities.registry.registry import Registry
    from modalities.training.recipe import TrainingRecipe

    write("optimizer/fast.yaml", "lr: 1.0\n")
    schema = Schema(Registry.standard(), TrainingRecipe)
    assert options_of("optimizer", Path("exp.yaml"), [], schema) == ["adam", "adam_w", "fast", "fsdp1_checkpointed"]
    assert options_of("parallel", Path("exp.yaml"), [], schema) == ["fsdp1", "fsdp2", "hsdp"]
    assert options_of("a" * 5000, Path("exp.yaml"), [], schema) == []


def test_a_list_without_self_is_a_warning(write: Write) -> None:
    write("exp.yaml", "defaults: [base]\n")
    (warning,) = plan_of(_composed()).faults
    assert (warning.severity, str(warning.place)) == ("warning", "exp.yaml:1:1")
    assert "_self_" in warning.hints[0]


def test_a_group_is_added_and_removed_on_the_command_line(write: Write) -> None:
    write("extra/seeded.yaml", "# @package _global_\nsettings: {seed: 5}\n")
    write("exp.yaml", "defaults: [base, _self_]\n")
    assert _composed("+extra=seeded").tree.plain()["settings"]["seed"] == 5
    write("exp.yaml", "defaults: [base, extra: seeded, _self_]\n".replace("extra: seeded", "{extra: seeded}"))
    assert "seed" not in _composed("~extra").tree.plain()["settings"]


def test_a_group_can_be_placed_elsewhere(write: Write) -> None:
    write("optimizer/fast.yaml", "component_key: optimizer\nvariant_key: adam\nlr: 1.0\n")
    write("exp.yaml", "defaults:\n  - base\n  - optimizer@second: fast\n  - _self_\n")
    composed = _composed()
    assert _value(composed, "second", "config", "lr") == (1.0, "optimizer/fast.yaml:3:5")
    assert _value(composed, "optimizer", "config", "lr")[0] == 0.01


def test_optional_parts_may_be_absent(write: Write) -> None:
    write("exp.yaml", "defaults:\n  - base\n  - optional extra: nothing\n  - _self_\n")
    assert not plan_of(_composed()).errors


def test_interpolations_and_odd_texts_survive_composing(write: Write) -> None:
    write(
        "exp.yaml",
        'defaults: [base, _self_]\nuser: {a: "${", b: 1e-5, c: 0x1F, d: "${x", e: [1, {f: "${settings.paths.data}"}]}\n',
    )
    user = _composed().unresolved.plain()["user"]
    assert user == {"a": "${", "b": 1e-5, "c": 31, "d": "${x", "e": [1, {"f": "${settings.paths.data}"}]}


@pytest.mark.parametrize(
    ("text", "words", "message", "place"),
    [
        ("defaults:\n  - bse\n", (), "there is no config `bse`", "exp.yaml:2:5"),
        (
            "defaults:\n  - base\n  - optimizer: adm_w\n",
            (),
            "the group `optimizer` has no option `adm_w`",
            "exp.yaml:3:16",
        ),
        (
            "defaults:\n  - base\n  - optimizer: adam\n",
            ("optimizer=adm",),
            "no option `adm`",
            "override `optimizer=adm`",
        ),
        ("defaults:\n  - exp\n", (), "cannot be composed", "exp.yaml:1:1"),
        ("defaults:\n  - broken\n", (), "no valid YAML", "broken.yaml:2:1"),
        ("defaults: base\n", (), "cannot be composed", "exp.yaml:1:1"),
        ("defaults:\n  - {a: b, c: d}\n", (), "cannot be composed", "exp.yaml:1:1"),
    ],
)
def test_what_cannot_be_composed_is_told_with_its_place(
    write: Write, text: str, words: tuple[str, ...], message: str, place: str
) -> None:
    write("exp.yaml", text)
    write("broken.yaml", "a: [1\n")
    with pytest.raises(ConfigError) as caught:
        _composed(*words)
    told = [(fault.message, str(fault.place)) for fault in caught.value.faults]
    assert any(message in text and where.startswith(place.rsplit(":", 1)[0]) for text, where in told), told


def test_a_nearest_option_is_named(write: Write) -> None:
    write("exp.yaml", "defaults:\n  - base\n  - optimizer: adm_w\n  - _self_\n")
    with pytest.raises(ConfigError, match="did you mean `adam_w`"):
        _composed()


def test_faults_in_a_group_s_file_point_there(write: Write) -> None:
    write("optimizer/mine.yaml", "# mine\nvariant_key: adam_w\nlrr: 1\n")
    write("exp.yaml", "defaults:\n  - base\n  - optimizer: mine\n  - _self_\n")
    (fault,) = plan_of(_composed()).errors
    assert (fault.message, str(fault.place)) == ("optimizer/adam_w has no field `lrr`", "optimizer/mine.yaml:3:1")


def test_hydra_s_own_state_is_left_as_it_was(write: Write) -> None:
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    write("exp.yaml", "defaults: [base, _self_]\n")
    with initialize_config_dir(version_base="1.3", config_dir=str(Path.cwd())):
        before = GlobalHydra.instance().hydra
        _composed()
        assert GlobalHydra.instance().hydra is before


def test_files_without_a_defaults_list_do_not_pay_for_hydra_s_composer(tmp_path: Path) -> None:
    write_tokens(tmp_path / "train.pbin", 1000, 128)
    (tmp_path / "exp.yaml").write_text(BASE)
    program = (
        "import sys; from pathlib import Path; from modalities.run import RunRequest, check; "
        "assert not check(RunRequest(Path('exp.yaml'), overrides=('optimizer.lr=1',))).errors; "
        "print('hydra._internal.core_plugins' in sys.modules, 'modalities.composition.defaults_list' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"
