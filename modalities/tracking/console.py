"""Progress and results on the screen: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from modalities.progress import TrainingProgress
from modalities.tracking.subscribers import (
    DummyProgressSubscriber,
    DummyResultsSubscriber,
    EvaluationResultBatch,
    ProgressSubscriberIF,
    ResultsSubscriberIF,
)

console = Console(highlight=False, soft_wrap=True)


class RichProgressSubscriber(ProgressSubscriberIF):
    """A live progress bar with the latest figures; without a terminal, a line per logged interval.

    Args:
        num_seen_steps: Steps done before this run.
        num_target_steps: Steps at its end.
    """

    def __init__(self, num_seen_steps: int, num_target_steps: int) -> None:
        self.num_target_steps = num_target_steps
        self._start: tuple[float, int] | None = None
        self._figures = ""
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("{task.description:<6}"),
                BarColumn(bar_width=8 if console.width < 100 else 24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TextColumn("ETA"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=console, transient=True)
            self._train = self._bar.add_task("train", total=num_target_steps, completed=num_seen_steps, figures="")
            self._evaluation = self._bar.add_task("eval", total=1, visible=False, figures="")

    def consume_train_step(self, progress: TrainingProgress) -> None:
        if self._start is None:
            # the first step pays for warming up, so the estimate starts after it
            self._start = (time.monotonic(), progress.num_seen_steps)
        if self._bar is not None:
            self._bar.start()
            self._bar.update(self._evaluation, visible=False)
            self._bar.update(self._train, completed=progress.num_seen_steps, figures=self._figures)

    def consume_eval_batch(self, dataloader_tag: str, num_batches_done: int, num_batches: int) -> None:
        if self._bar is not None:
            self._bar.update(
                self._evaluation, completed=num_batches_done, total=num_batches, visible=True, figures=dataloader_tag
            )

    def consume_train_result(self, result: EvaluationResultBatch) -> None:
        self._figures = _short_figures(result)
        if self._bar is None:
            steps = f"step {result.num_train_steps_done:>{len(str(self.num_target_steps))}}/{self.num_target_steps}"
            console.print(f"{steps}  {_figures(result)}  ETA {self._remaining(result.num_train_steps_done)}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _remaining(self, num_steps_done: int) -> str:
        if self._start is None or num_steps_done <= self._start[1]:
            return "?"
        start_time, start_steps = self._start
        seconds_per_step = (time.monotonic() - start_time) / (num_steps_done - start_steps)
        remaining_s = round(seconds_per_step * (self.num_target_steps - num_steps_done))
        return f"{remaining_s // 3600}:{remaining_s // 60 % 60:02}:{remaining_s % 60:02}"


class RichResultsSubscriber(ResultsSubscriberIF):
    """Prints a line per evaluation; training intervals are the progress subscriber's."""

    def consume_result(self, result: EvaluationResultBatch) -> None:
        if "train loss avg" in result.losses:
            return
        losses = "  ".join(f"{name} {value:.4f}" for name, value in result.losses.items())
        console.print(f"step {result.num_train_steps_done}  evaluation of {result.dataloader_tag}: {losses}")


def make_progress_subscriber(
    eval_dataloaders: list[Any] | None,
    train_dataloader_tag: str,
    num_seen_steps: int,
    num_target_steps: int,
    global_rank: int,
) -> ProgressSubscriberIF:
    """Builder of ``progress_subscriber: rich``; only rank 0 shows anything."""
    return RichProgressSubscriber(num_seen_steps, num_target_steps) if global_rank == 0 else DummyProgressSubscriber()


def make_results_subscriber(num_ranks: int, global_rank: int) -> ResultsSubscriberIF:
    """Builder of ``results_subscriber: rich``; only rank 0 prints."""
    return RichResultsSubscriber() if global_rank == 0 else DummyResultsSubscriber()


def _short_figures(result: EvaluationResultBatch) -> str:
    """For the bar, which shares a line of 80 characters with them."""
    return (
        f"loss {result.losses['train loss avg']:.3f} lr {result.throughput_metrics['lr mean']:.1e} "
        f"|g| {result.metrics['grad norm last']:.2f} {result.throughput_metrics['train tokens/s']:,.0f} tok/s"
    )


def _figures(result: EvaluationResultBatch) -> str:
    return (
        f"loss {result.losses['train loss avg']:.4f}  lr {result.throughput_metrics['lr mean']:.2e}  "
        f"grad norm {result.metrics['grad norm last']:.3f}  {result.throughput_metrics['train tokens/s']:,.0f} tokens/s"
    )
