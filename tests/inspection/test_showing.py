"""A config shown is the config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modalities.config.yaml_loader import load_yaml
from modalities.inspection.differences import differences
from modalities.inspection.showing import show, show_short
from modalities.run import RunRequest, compose
from modalities.testing.tiny import tiny_config, write_config
from tests.composition.conftest import Composer
from tests.faults.cases import BASE


def test_show_of_show_is_the_identity(composer: Composer) -> None:
    shown = show(composer("optimizer=adam", "model.n_layer=3"))
    assert show(composer(text=shown)) == shown
    assert "instance_key: model\n" in shown
    assert "n_layer: 3\n" in shown


def test_what_belongs_to_a_rank_stays_a_question(composer: Composer) -> None:
    shown = show(composer())
    assert "rank: ${cuda_env:RANK}\n" in shown
    assert "experiment_id: ${modalities_env:experiment_id}\n" in shown


def test_odd_texts_come_back_as_they_were(composer: Composer) -> None:
    texts = ["1e-5", "yes", "0123", "12:30:45", "null", "x: y", "# h", "", "ü\n", "2024-01-01", "1_000", "~", "-"]
    odd = {"texts": texts, "number": 1e-5, "both": [1, "1", True, "true"], "empty": {"list": [], "mapping": {}}}
    text = BASE + f"user: {json.dumps(odd, ensure_ascii=False)}\n"
    shown = show(composer(text=text))
    Path("shown.yaml").write_text(shown, encoding="utf-8")
    assert load_yaml(Path("shown.yaml"), []).plain()["user"] == odd


def test_provenance_names_files_words_and_defaults(composer: Composer) -> None:
    shown = show(composer("optimizer.lr=0.5"), provenance=True)
    assert "    lr: 0.5  # override `optimizer.lr=0.5`\n" in shown
    assert "    eps: 1.0e-08  # exp.yaml:66:10\n" in shown
    assert "    raw_data_path: train.pbin  # exp.yaml:16:18 via ${settings.paths.data}\n" in shown
    assert "    every: 4  # default of checkpoint_saving/dcp.every via " in shown
    assert show(composer(text=shown)) == show(composer("optimizer.lr=0.5"))


def test_the_short_form_means_the_same(composer: Composer, tmp_path: Path) -> None:
    before = composer()
    short = show_short(before)
    assert "checkpoint_saving: dcp\n" in short
    assert "model: ${ref:sharded_model}\n" in short
    assert "checkpoint_loading" not in short  # found by default
    assert len(short.splitlines()) < len(show(before).splitlines()) / 2
    assert differences(before, composer(text=short)) == []


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_the_short_form_of_a_canonical_file(tmp_path: Path, wrapper: str) -> None:
    file = write_config(tiny_config(tmp_path, wrapper=wrapper), tmp_path / "exp.yaml")
    before = compose(RunRequest(file))
    (tmp_path / "short.yaml").write_text(show_short(before))
    after = compose(RunRequest(tmp_path / "short.yaml"))
    assert differences(before, after) == []
    assert show_short(after) == show_short(before)
