"""A file rewritten in short form keeps its comments and its meaning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from modalities.exceptions import UserError
from modalities.inspection.differences import differences
from modalities.inspection.upgrading import upgrade
from modalities.run import RunRequest, compose
from modalities.testing.tiny import tiny_config, write_config

OLD = """\
# the optimizer
optimizer:  # behind the key
  component_key: optimizer
  variant_key: adam_w # behind the variant
  config: # behind config
    # above a field
    lr: 1e-3  # behind a field
    wrapped_model:
      instance_key: model   # behind a name
      pass_type: BY_REFERENCE
    betas:
      - 0.9
      - 0.95

train_dataloader:
  component_key: data_loader
  variant_key: default
  config: {num_workers: 0, dataset: {instance_key: train_dataset, pass_type: BY_REFERENCE}}
eval_dataloaders:
  - instance_key: one
    pass_type: BY_REFERENCE
  - component_key: data_loader
    variant_key: default
    config:
      num_workers: 1
progress_subscriber:
  component_key: progress_subscriber
  variant_key: dummy
  config: {}
spare:
  component_key: model
  variant_key: fsdp_wrapped
  config:
    block_names: [A]
# the end
"""

NEW = """\
# the optimizer
optimizer:  # behind the key
  variant_key: adam_w # behind the variant
  # behind config
  # above a field
  lr: 1e-3  # behind a field
  wrapped_model: ${ref:model}  # behind a name
  betas:
    - 0.9
    - 0.95

train_dataloader:
  variant_key: default
  num_workers: 0
  dataset: "${ref:train_dataset}"
eval_dataloaders:
  - ${ref:one}
  - variant_key: default
    num_workers: 1
progress_subscriber:
  variant_key: dummy
spare:
  component_key: model
  variant_key: fsdp1_wrapped
  block_names: [A]
# the end
"""


def _upgraded(file: Path) -> str:
    return upgrade(compose(RunRequest(file)), file)


def test_every_layout(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(OLD)
    assert _upgraded(file) == NEW
    file.write_text(NEW)
    assert _upgraded(file) == NEW


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_a_whole_experiment(tmp_path: Path, wrapper: str) -> None:
    file = write_config(tiny_config(tmp_path, wrapper=wrapper), tmp_path / "exp.yaml")
    before, num_lines = compose(RunRequest(file)), len(file.read_text().splitlines())
    text = _upgraded(file)
    file.write_text(text)
    assert differences(before, compose(RunRequest(file))) == []
    assert "instance_key" not in text
    assert not re.search(r"^  config:", text, re.MULTILINE)
    assert len(text.splitlines()) < 0.85 * num_lines


def test_renamed_and_removed_fields_are_mended(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(
        "tokenizer:\n  component_key: tokenizer\n  variant_key: pretrained_sp_tokenizer\n  config:\n"
        "    tokenizer_model_file: x # kept\n    padding: false\n    truncation: false\n"
        "model:\n  component_key: model\n  variant_key: gpt2\n  config:\n    attention_norm:\n"
        "      component_key: layer_norm\n      variant_key: rms_norm\n      config:\n        ndim: 8\n"
    )
    assert _upgraded(file) == (
        "tokenizer:\n  variant_key: pretrained_sp_tokenizer\n"
        "  tokenizer_model_file: x # kept\n"
        "model:\n  variant_key: gpt2\n  attention_norm_config:\n"
        "    norm_type: rms_norm\n    config:\n      ndim: 8\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer: {variant_key: adam_w, lr: 1, config: {eps: 1}}\n", "stands beside"),
        ("a: [1\n", "no valid YAML"),
        ("a: 1\na: 2\n", "given twice"),
    ],
)
def test_a_file_in_doubt_is_left_alone(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        _upgraded(file)
    assert file.read_text() == text


def test_shared_anchors_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "anchored.yaml"
    file.write_text(
        "optimizer:\n  component_key: optimizer\n  variant_key: adam\n  config: &fields\n    lr: 1.0\n"
        "second:\n  component_key: optimizer\n  variant_key: adam_w\n  config: *fields\n"
    )
    before = compose(RunRequest(file))
    file.write_text(_upgraded(file))
    assert differences(before, compose(RunRequest(file))) == []
