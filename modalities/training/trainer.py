"""The training loop."""

from __future__ import annotations

import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from modalities.checkpointing.app_state import AppState
from modalities.checkpointing.checkpoint_saving import CheckpointSaving
from modalities.checkpointing.resume_state import OWED_EVALUATIONS
from modalities.data.batch import DatasetBatch
from modalities.data.dataloader import LLMDataLoader
from modalities.exceptions import CheckpointError, RunsPart
from modalities.parallel.gradient_sync import gradient_sync
from modalities.parallel.process_group import global_rank, world_size
from modalities.progress import TrainingProgress
from modalities.tracking.subscribers import EvaluationResultBatch, ProgressSubscriberIF, ResultsSubscriberIF
from modalities.training.evaluator import AutocastFactory, Evaluator
from modalities.training.gradient_clipping import GradientClipperIF
from modalities.training.losses import Loss
from modalities.training.mfu import MFUCalculatorIF
from modalities.training.parting import Watch
from modalities.training.rules import metric_name
from modalities.training.stopping import StopRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepProfile:
    """Shape of an optimizer step.

    Args:
        gradient_accumulation_steps: Micro-batches per step and rank.
        local_train_micro_batch_size: Samples per micro-batch and rank.
        sequence_length: Tokens per sample.
        dp_degree: Ranks that train on different data.
    """

    gradient_accumulation_steps: int
    local_train_micro_batch_size: int
    sequence_length: int
    dp_degree: int

    @property
    def num_samples(self) -> int:
        """Samples per step, over all ranks."""
        return self.gradient_accumulation_steps * self.local_train_micro_batch_size * self.dp_degree

    @property
    def num_tokens(self) -> int:
        """Tokens per step, over all ranks."""
        return self.num_samples * self.sequence_length


@dataclass(frozen=True)
class Intervals:
    """How often something is done, in optimizer steps; all of it is done after the last step too."""

    training_log_interval_in_steps: int
    evaluation_interval_in_steps: int
    checkpointing_interval_in_steps: int


class IntervalFigures:
    """Figures of the steps since the last log; they stay on the device until they are logged."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reset()

    def reset(self) -> None:
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.grad_norm_sum = torch.zeros((), device=self.device)
        self.last_loss = self.last_grad_norm = torch.zeros((), device=self.device)
        self.num_steps = 0
        self.seconds = 0.0
        self.learning_rates: list[float] = []

    def state(self) -> dict[str, float]:
        """The sums so far, so that a run resumed between two logs logs the same means."""
        return {
            "loss_sum": self.loss_sum.item(),
            "grad_norm_sum": self.grad_norm_sum.item(),
            "num_steps": self.num_steps,
            "seconds": self.seconds,
        }

    def restore(self, state: dict[str, float]) -> None:
        """Go on from the sums of :meth:`state`; from zero where there are none."""
        if "loss_sum" in state:
            self.loss_sum.fill_(state["loss_sum"])
            self.grad_norm_sum.fill_(state["grad_norm_sum"])
            self.num_steps, self.seconds = int(state["num_steps"]), state["seconds"]

    def add(self, loss: Tensor, grad_norm: Tensor, learning_rates: list[float], seconds: float) -> None:
        self.loss_sum += loss
        self.grad_norm_sum += grad_norm
        self.last_loss, self.last_grad_norm = loss, grad_norm
        self.learning_rates = learning_rates
        self.num_steps += 1
        self.seconds += seconds


class Trainer:
    """Trains a model step by step, logs, evaluates and saves.

    Args:
        app_state: Model, optimizer and scheduler.
        loss_fn: The loss.
        gradient_clipper: Measures and clips gradients.
        train_dataloader: Endless source of training batches.
        eval_dataloaders: Held-out data.
        checkpoint_saving: Where checkpoints go.
        step_profile: Shape of a step.
        intervals: How often to log, evaluate and save.
        device: Where the model is.
        autocast_dtype: Precision of computation, or None for the model's own.
        progress_subscriber: Shows progress.
        results_subscribers: Take the figures, on rank 0.
        mfu_calculator: Optional.
        watch: Looks at every logged step, if anything does.
    """

    def __init__(
        self,
        app_state: AppState,
        loss_fn: Loss,
        gradient_clipper: GradientClipperIF,
        train_dataloader: LLMDataLoader,
        eval_dataloaders: list[LLMDataLoader],
        checkpoint_saving: CheckpointSaving,
        step_profile: StepProfile,
        intervals: Intervals,
        device: torch.device,
        autocast_dtype: torch.dtype | None,
        progress_subscriber: ProgressSubscriberIF,
        results_subscribers: list[ResultsSubscriberIF],
        mfu_calculator: MFUCalculatorIF | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.app_state = app_state
        self.loss_fn = loss_fn
        self.gradient_clipper = gradient_clipper
        self.train_dataloader = train_dataloader
        self.eval_dataloaders = eval_dataloaders
        self.checkpoint_saving = checkpoint_saving
        self.step_profile = step_profile
        self.intervals = intervals
        self.device = device
        self.autocast = AutocastFactory(device, autocast_dtype)
        self.progress_subscriber = progress_subscriber
        self.results_subscribers = results_subscribers
        self.mfu_calculator = mfu_calculator
        self.watch = watch
        self.evaluator = Evaluator(loss_fn, device, self.autocast, progress_subscriber)
        self.last_checkpoint: Path | None = None
        self.num_owed_evaluations = 0
        self._metrics: dict[str, float] = {}
        self._measured_at = -1

    def train(
        self, progress: TrainingProgress, stop_request: StopRequest, before_first_step: Callable[[], None]
    ) -> TrainingProgress:
        """Train until the target, or until it is asked to stop; both end with a checkpoint.

        Args:
            progress: Where to start from.
            stop_request: Whether to stop early.
            before_first_step: Called last before the first step; sets the random states.

        Returns:
            How far it got.

        Raises:
            RunsPart: It is no longer the run that it is checked against.
            CheckpointError: A checkpoint could not be written.
        """
        batches = self.train_dataloader.stream(progress.num_seen_samples)
        figures = IntervalFigures(self.device)
        figures.restore(self.app_state.rank_state)
        for part in self.app_state.model_parts:
            part.train()
        num_owed = num_owed_evaluations(self.app_state)
        if num_owed:
            self.num_owed_evaluations = self._evaluate(progress, stop_request, num_owed)
        if self.num_owed_evaluations:
            # the checkpoint that the run started from tells of all of them
            return progress
        before_first_step()
        while not progress.is_finished:
            stop_request.seconds_to_save = self.checkpoint_saving.longest_save_s
            stop_request.begin_agreement(has_failed=self.checkpoint_saving.has_failed)
            self.step(batches, figures)
            progress = progress.after_step(self.step_profile.num_samples, self.step_profile.num_tokens)
            self.progress_subscriber.consume_train_step(progress)
            if self._is_due(progress, self.intervals.training_log_interval_in_steps):
                result = self._log(progress, figures)
                parting = self.watch.look(result) if self.watch is not None else None
                if parting is not None:
                    self._part(progress, figures, parting)
            if stop_request.is_failure_agreed():
                # a checkpoint that was being written beside training: each rank knows the cause, or leaves with the others
                self.checkpoint_saving.settle()
                raise CheckpointError("saving a checkpoint failed on another rank, which tells why")
            stopping = stop_request.is_agreed()
            is_evaluated = self._is_due(progress, self.intervals.evaluation_interval_in_steps)
            num_owed = len(self.eval_dataloaders) if is_evaluated else 0
            if num_owed and not stopping:
                num_owed = self._evaluate(progress, stop_request, num_owed)
                stopping = num_owed > 0
            if self._is_due(progress, self.intervals.checkpointing_interval_in_steps) or stopping:
                self.num_owed_evaluations = num_owed
                self.app_state.rank_state = {**figures.state(), OWED_EVALUATIONS: num_owed}
                self._save(progress, stopping)
            if stopping:
                break
        self.checkpoint_saving.settle()
        return progress

    def losses_at(self, num_steps: int) -> dict[str, float]:
        """Losses of the evaluation at a step, by data; empty if there was none."""
        return dict(self._metrics) if self._measured_at == num_steps else {}

    def close(self) -> None:
        """Let the subscribers finish."""
        self.progress_subscriber.close()
        for subscriber in self.results_subscribers:
            subscriber.close()

    def _is_due(self, progress: TrainingProgress, interval: int) -> bool:
        return progress.num_seen_steps % interval == 0 or progress.is_finished

    def step(self, batches: Iterator[DatasetBatch], figures: IntervalFigures) -> None:
        start = time.perf_counter()
        num_micro_batches = self.step_profile.gradient_accumulation_steps
        micro_batches = [next(batches) for _ in range(num_micro_batches)]
        # gradients are averaged over the ranks, so each rank's share is weighted by their number
        num_targets = self._global_num_targets(micro_batches)
        weight = self.step_profile.dp_degree / num_targets
        step_loss = torch.zeros((), device=self.device)
        for index, micro_batch in enumerate(micro_batches):
            micro_batch = micro_batch.to(self.device)
            with gradient_sync(self.app_state.model_parts, enabled=index == num_micro_batches - 1):
                with self.autocast():
                    predictions = self.app_state.model_parts[0](micro_batch.samples)
                    loss = self.loss_fn.total(predictions, micro_batch.targets) * weight
                loss.backward()
            step_loss += loss.detach()
        grad_norm = self.gradient_clipper.clip_gradients()
        optimizer = self.app_state.optimizer
        learning_rates = [float(group["lr"]) for group in optimizer.param_groups]
        optimizer.step()
        if self.app_state.lr_scheduler is not None:
            self.app_state.lr_scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        figures.add(step_loss, grad_norm, learning_rates, time.perf_counter() - start)

    def _global_num_targets(self, micro_batches: list[DatasetBatch]) -> int:
        """Targets of the step that count, over all ranks; counted only where some may be masked."""
        if not self.train_dataloader.masks_targets:
            return self.step_profile.num_tokens
        count = sum((self.loss_fn.num_targets(batch.targets) for batch in micro_batches), torch.zeros(()))
        if world_size() > 1:
            dist.all_reduce(count)
        return max(1, int(count))

    def _part(self, progress: TrainingProgress, figures: IntervalFigures, parting: str) -> None:
        """End a run that is no longer the one it is checked against, with its state saved to be looked into.

        Raises:
            RunsPart: Always.
        """
        self.app_state.rank_state = {**figures.state(), OWED_EVALUATIONS: 0}
        self._save(progress, True)
        self.checkpoint_saving.settle()
        raise RunsPart(f"{parting}\n  saved here: {self.last_checkpoint}; `modalities checkpoint diff` compares them")

    def _log(self, progress: TrainingProgress, figures: IntervalFigures) -> EvaluationResultBatch:
        losses = torch.stack([figures.loss_sum, figures.last_loss.double()])
        if world_size() > 1:
            dist.all_reduce(losses)
        loss_sum, last_loss = (losses / self.step_profile.dp_degree).tolist()
        samples_per_second = figures.num_steps * self.step_profile.num_samples / figures.seconds
        result = EvaluationResultBatch(
            self.train_dataloader.dataloader_tag,
            progress.num_seen_steps,
            losses={"train loss avg": loss_sum / figures.num_steps, "train loss last": last_loss},
            metrics={
                "consumed tokens": progress.num_seen_tokens,
                "grad norm avg": (figures.grad_norm_sum / figures.num_steps).item(),
                "grad norm last": figures.last_grad_norm.item(),
            },
            throughput_metrics={
                "train samples/s": samples_per_second,
                "train tokens/s": samples_per_second * self.step_profile.sequence_length,
                "train mfu (16-bit)": self.mfu_calculator.compute(samples_per_second) if self.mfu_calculator else -1.0,
                "lr mean": sum(figures.learning_rates) / len(figures.learning_rates),
                "peak memory rank 0 (MB)": _peak_memory_mb(self.device),
            },
        )
        if not math.isfinite(last_loss) and global_rank() == 0:
            logger.warning("the loss of step %d is %s", progress.num_seen_steps, last_loss)
        self.progress_subscriber.consume_train_result(result)
        self._publish(result)
        figures.reset()
        return result

    def _evaluate(self, progress: TrainingProgress, stop_request: StopRequest, num_owed: int) -> int:
        """Evaluate on the last so many of the held-out data; gives how many are left if the run is to stop before."""
        for index, dataloader in enumerate(self.eval_dataloaders[-num_owed:]):
            steps = progress.num_seen_steps
            result = self.evaluator.evaluate(self.app_state.model_parts, dataloader, steps, stop_request)
            if result is None:
                return num_owed - index
            (loss,) = result.losses.values()
            if self._measured_at != steps:
                self._metrics, self._measured_at = {}, steps
            self._metrics[metric_name(dataloader.dataloader_tag)] = loss
            self._publish(result)
        return 0

    def _save(self, progress: TrainingProgress, whatever_the_strategy: bool) -> None:
        save = self.checkpoint_saving.save_checkpoint
        if whatever_the_strategy or progress.is_finished:
            save = self.checkpoint_saving.save_now
        metrics = self.losses_at(progress.num_seen_steps)
        self.last_checkpoint = save(progress, self.app_state, metrics) or self.last_checkpoint

    def _publish(self, result: EvaluationResultBatch) -> None:
        if global_rank() == 0:
            for subscriber in self.results_subscribers:
                subscriber.consume_result(result)


def num_owed_evaluations(app_state: AppState) -> int:
    """Evaluations that were due when the run was stopped where this state is from."""
    return int(app_state.rank_state.get(OWED_EVALUATIONS, 0))


def _peak_memory_mb(device: torch.device) -> float:
    """Peak of the accelerator's allocated memory, or of the process's resident memory, in 2**20 bytes."""
    if device.type != "cpu":
        return float(torch.get_device_module(device).max_memory_allocated(device)) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
