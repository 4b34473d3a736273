"""Figures of a run as JSON lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from modalities.tracking import json_lines
from modalities.tracking.subscribers import EvaluationResultBatch, ResultsSubscriberIF


class MetricsFile(ResultsSubscriberIF):
    """Appends one JSON object per line, with the fields of :class:`EvaluationResultBatch`, in full precision.

    Args:
        output_file_path: The file; its folder is made if absent.
    """

    def __init__(self, output_file_path: Path) -> None:
        self.path = output_file_path
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def consume_result(self, result: EvaluationResultBatch) -> None:
        json_lines.append(self.path, asdict(result))

    def rewind(self, num_steps: int, owed: Sequence[str] = ()) -> None:
        """Go back to a step: later lines, written before the run broke off, move to a file beside.

        A run that goes on from a checkpoint writes those steps again.

        Args:
            num_steps: Optimizer steps done at the checkpoint.
            owed: Tags of the data that it evaluates on again at that very step.
        """
        json_lines.rewind(self.path, lambda result: _stays(result, num_steps, owed))


def _stays(result: Mapping[str, Any], num_steps: int, owed: Sequence[str]) -> bool:
    step = result["num_train_steps_done"]
    return bool(step < num_steps or (step == num_steps and result["dataloader_tag"] not in owed))


def make_metrics_file(output_file_path: Path) -> ResultsSubscriberIF:
    """Builder of ``results_subscriber: to_disc``; the trainer hands figures to rank 0's subscriber only."""
    return MetricsFile(output_file_path)
