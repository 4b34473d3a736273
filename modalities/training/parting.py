"""Comparing a run with another while it goes: the first step and tensor at which they part."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.discovery import Checkpoint
from modalities.checkpointing.reading.sources import MODEL_PREFIX, open_source
from modalities.exceptions import UserError
from modalities.parallel.process_group import global_rank, on_rank_zero
from modalities.tracking import json_lines
from modalities.tracking.subscribers import EvaluationResultBatch
from modalities.training.determinism import tensor_digest, weight_digests

logger = logging.getLogger(__name__)

_FIGURES = ("train loss last", "grad norm last", "consumed tokens", "lr mean")
"""Of a single step, so that runs with other logging intervals can be compared."""


class DigestFile:
    """Digests of the weights at every logged step, a line each.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def rewind(self, num_steps: int) -> None:
        """Go back to a step."""
        json_lines.rewind(self.path, lambda line: bool(line["num_train_steps_done"] <= num_steps))

    def add(self, num_steps: int, digests: dict[str, str]) -> None:
        """Keep those of a step."""
        json_lines.append(self.path, {"num_train_steps_done": num_steps, "digests": digests})

    def read(self) -> dict[int, dict[str, str]]:
        """All of them by step."""
        return {line["num_train_steps_done"]: line["digests"] for line in json_lines.records_in(self.path)}


class OtherRun:
    """What another run has logged and saved, to be compared with; on rank 0.

    Args:
        name: As the user named it.
        metrics_file: Its figures.
        digest_file: Its digests.
        train_tag: Name of its training data in the figures.
        checkpoints: Its checkpoints, for steps of which it has no digests.

    Raises:
        UserError: It has logged nothing.
    """

    def __init__(
        self, name: str, metrics_file: Path, digest_file: Path, train_tag: str, checkpoints: list[Checkpoint]
    ) -> None:
        self.name = name
        self.figures = {
            line["num_train_steps_done"]: {**line["losses"], **line["metrics"], **line["throughput_metrics"]}
            for line in json_lines.records_in(metrics_file)
            if line["dataloader_tag"] == train_tag
        }
        self.checkpoints = {checkpoint.progress.num_seen_steps: checkpoint for checkpoint in checkpoints}
        if not self.figures and not self.checkpoints:
            raise UserError(f"--check-against {name}: there is no run that has logged steps of `{train_tag}`")
        self._digests = DigestFile(digest_file).read()

    def has_digests_of(self, num_steps: int) -> bool:
        """Whether weights can be compared at a step."""
        return num_steps in self._digests or num_steps in self.checkpoints

    def digests_of(self, num_steps: int) -> dict[str, str]:
        """Of a step; made of its checkpoint, a tensor at a time, where it has kept none."""
        if num_steps in self._digests:
            return self._digests[num_steps]
        source = open_source(self.checkpoints[num_steps].path)
        keys = [key for key, form in source.forms.items() if key.startswith(MODEL_PREFIX) and form is not None]
        return {key.removeprefix(MODEL_PREFIX): tensor_digest(source.read(key)) for key in keys}


class Watch:
    """Looks at every logged step: keeps digests of the weights, and compares them with another run's.

    Args:
        app_state: Of the run.
        digest_file: Where digests are kept, if they are.
        other: On rank 0, what is compared with, if anything is; on other ranks None.
        is_checked: Whether there is one to compare with; the same on all ranks.
    """

    def __init__(
        self, app_state: AppState, digest_file: DigestFile | None, other: OtherRun | None, is_checked: bool
    ) -> None:
        self._app_state, self._digest_file, self._other, self._is_checked = app_state, digest_file, other, is_checked
        self.num_compared = 0

    def look(self, result: EvaluationResultBatch) -> str | None:
        """Look at a step; all ranks must call it.

        Args:
            result: The step's figures.

        Returns:
            How the runs part, on all ranks; None if they do not.
        """
        num_steps = result.num_train_steps_done
        is_comparable = on_rank_zero(lambda: self._has_digests_of(num_steps)) if self._is_checked else False
        digests: dict[str, str] = {}
        if self._digest_file is not None or is_comparable:
            digests = weight_digests(self._app_state)
        if self._digest_file is not None and global_rank() == 0:
            self._digest_file.add(num_steps, digests)
        return on_rank_zero(lambda: self._compare(result, digests, is_comparable)) if self._is_checked else None

    def _has_digests_of(self, num_steps: int) -> bool:
        assert self._other is not None
        return self._other.has_digests_of(num_steps)

    def _compare(self, result: EvaluationResultBatch, digests: dict[str, str], is_comparable: bool) -> str | None:
        other = self._other
        assert other is not None
        num_steps = result.num_train_steps_done
        theirs = other.figures.get(num_steps)
        ours = {**result.losses, **result.metrics, **result.throughput_metrics}
        parted = [name for name in _FIGURES if theirs is not None and name in theirs and not _same(ours, theirs, name)]
        tensors = _parted_tensors(digests, other.digests_of(num_steps)) if is_comparable else []
        self.num_compared += theirs is not None or is_comparable
        if not parted and not tensors:
            return None
        lines = [f"this run parts from {other.name} at step {num_steps}:"]
        lines += [f"  {name}: {ours[name]!r} here, {theirs[name]!r} there" for name in parted if theirs is not None]
        if tensors:
            lines.append(f"  first tensor that differs: {tensors[0]} ({len(tensors)} of {len(digests)} do)")
        elif is_comparable:
            lines.append("  all weights are equal")
        else:
            lines.append("  which tensor is not known: settings.deterministic: true lets a run keep digests of them")
        if num_steps in other.checkpoints:
            lines.append(f"  its checkpoint of that step: {other.checkpoints[num_steps].path}")
        return "\n".join(lines)


def _parted_tensors(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    return [name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)]


def _same(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> bool:
    a, b = ours.get(name), theirs[name]
    return bool(a == b or (a != a and b != b))
