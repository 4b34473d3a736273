"""What a run tells about itself, and who may listen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from modalities.progress import TrainingProgress


@dataclass(frozen=True)
class EvaluationResultBatch:
    """Figures of one training interval or of one evaluation.

    Args:
        dataloader_tag: Which data.
        num_train_steps_done: Optimizer steps done so far.
        losses: By name, in nats per token.
        metrics: By name.
        throughput_metrics: By name; rates per second.
    """

    dataloader_tag: str
    num_train_steps_done: int
    losses: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    throughput_metrics: dict[str, float] = field(default_factory=dict)


class ProgressSubscriberIF(ABC):
    """Shows how far a run has got."""

    @abstractmethod
    def consume_train_step(self, progress: TrainingProgress) -> None:
        """An optimizer step is done."""

    @abstractmethod
    def consume_eval_batch(self, dataloader_tag: str, num_batches_done: int, num_batches: int) -> None:
        """A batch of an evaluation is done."""

    @abstractmethod
    def consume_train_result(self, result: EvaluationResultBatch) -> None:
        """The figures of a training interval are known."""

    def close(self) -> None:  # noqa: B027 most subscribers hold nothing open
        """The run ends."""


class ResultsSubscriberIF(ABC):
    """Takes the figures of a run."""

    @abstractmethod
    def consume_result(self, result: EvaluationResultBatch) -> None:
        """New figures, on rank 0."""

    def close(self) -> None:  # noqa: B027 most subscribers hold nothing open
        """The run ends."""


class DummyProgressSubscriber(ProgressSubscriberIF):
    """Shows nothing."""

    def consume_train_step(self, progress: TrainingProgress) -> None: ...

    def consume_eval_batch(self, dataloader_tag: str, num_batches_done: int, num_batches: int) -> None: ...

    def consume_train_result(self, result: EvaluationResultBatch) -> None: ...


class DummyResultsSubscriber(ResultsSubscriberIF):
    """Drops the figures."""

    def consume_result(self, result: EvaluationResultBatch) -> None: ...
