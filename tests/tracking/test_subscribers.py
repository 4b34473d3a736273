"""Where the figures of a run go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modalities.progress import TrainingProgress
from modalities.tracking import console
from modalities.tracking.console import RichProgressSubscriber, RichResultsSubscriber
from modalities.tracking.metrics_file import MetricsFile
from modalities.tracking.remote import make_tensorboard_subscriber, make_wandb_subscriber
from modalities.tracking.settings import WandbMode
from modalities.tracking.subscribers import DummyResultsSubscriber, EvaluationResultBatch


def _train_result(step: int) -> EvaluationResultBatch:
    return EvaluationResultBatch(
        "train",
        step,
        losses={"train loss avg": 1 / 3, "train loss last": 0.25},
        metrics={"consumed tokens": step * 10, "grad norm last": 0.5},
        throughput_metrics={"lr mean": 1e-3, "train tokens/s": 1234.0},
    )


def test_metrics_are_json_lines_in_full_precision(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "deep" / "metrics.jsonl")
    file.consume_result(_train_result(1))
    file.consume_result(_train_result(2))
    lines = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert [line["num_train_steps_done"] for line in lines] == [1, 2]
    assert lines[0]["losses"]["train loss avg"] == 1 / 3
    assert set(lines[0]) == {"dataloader_tag", "num_train_steps_done", "losses", "metrics", "throughput_metrics"}


def test_rewinding_sets_later_lines_aside_also_half_a_line(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        file.consume_result(_train_result(step))
    with file.path.open("a") as opened:
        opened.write('{"dataloader_tag": "tr')
    file.rewind(2)
    assert [json.loads(line)["num_train_steps_done"] for line in file.path.read_text().splitlines()] == [1, 2]
    superseded = (tmp_path / "metrics.superseded.jsonl").read_text().splitlines()
    assert len(superseded) == 2
    assert json.loads(superseded[0])["num_train_steps_done"] == 3
    file.rewind(2)
    assert len((tmp_path / "metrics.superseded.jsonl").read_text().splitlines()) == 2


def test_plain_lines_have_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert not console.console.is_terminal
    subscriber = RichProgressSubscriber(0, 100)
    subscriber.consume_train_step(TrainingProgress(1, 10, 100, 1000))
    subscriber.consume_train_result(_train_result(10))
    RichResultsSubscriber().consume_result(EvaluationResultBatch("heldout", 10, losses={"loss": 2.5}))
    RichResultsSubscriber().consume_result(_train_result(10))
    progress, evaluation = capsys.readouterr().out.splitlines()
    assert progress.startswith("step  10/100  loss 0.3333  lr 1.00e-03  grad norm 0.500  1,234 tokens/s  ETA ")
    assert evaluation == "step 10  evaluation of heldout: loss 2.5000"


def test_tensorboard_files_hold_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="an extra")
    subscriber = make_tensorboard_subscriber(0, tmp_path)
    subscriber.consume_result(_train_result(3))
    subscriber.close()
    (file,) = tmp_path.iterdir()
    assert b"train/train loss avg" in file.read_bytes()
    assert isinstance(make_tensorboard_subscriber(1, tmp_path), DummyResultsSubscriber)


def test_wandb_offline_needs_no_account(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="an extra")
    config = tmp_path / "config.yaml"
    config.write_text("a: 1\n")
    subscriber = make_wandb_subscriber(0, None, "project", "run-1", WandbMode.OFFLINE, tmp_path / "w", config)
    subscriber.consume_result(_train_result(3))
    subscriber.close()
    assert list((tmp_path / "w").rglob("*.wandb"))
    assert isinstance(
        make_wandb_subscriber(0, None, "p", "r", WandbMode.DISABLED, tmp_path, config), DummyResultsSubscriber
    )
