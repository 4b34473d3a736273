"""The loss on held-out data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from modalities.data.dataloader import LLMDataLoader
from modalities.parallel.process_group import world_size
from modalities.tracking.subscribers import EvaluationResultBatch, ProgressSubscriberIF
from modalities.training.losses import Loss
from modalities.training.stopping import StopRequest


class Evaluator:
    """Evaluates a model; every target token counts the same, whatever batch and rank it is on.

    Args:
        loss_fn: The loss.
        device: Where the model is.
        autocast: Makes the context that the forward pass runs in.
        progress_subscriber: Is told of each batch.
    """

    def __init__(
        self, loss_fn: Loss, device: torch.device, autocast: AutocastFactory, progress_subscriber: ProgressSubscriberIF
    ) -> None:
        self.loss_fn, self.device, self.autocast = loss_fn, device, autocast
        self.progress_subscriber = progress_subscriber

    def evaluate(
        self,
        model_parts: list[nn.Module],
        dataloader: LLMDataLoader,
        num_train_steps_done: int,
        stop_request: StopRequest | None = None,
    ) -> EvaluationResultBatch | None:
        """One pass over the data; all ranks must call it, and all have the same number of batches.

        Args:
            model_parts: The model.
            dataloader: The data.
            num_train_steps_done: Optimizer steps done.
            stop_request: Asked before each batch.

        Returns:
            The mean loss per target token and the sample rate, over all ranks; None if it was asked to stop.
        """
        start = time.perf_counter()
        # loss sum, targets, samples
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        with _evaluating(model_parts), torch.no_grad():
            for index, batch in enumerate(dataloader):
                if stop_request is not None:
                    stop_request.begin_agreement()
                batch = batch.to(self.device)
                with self.autocast():
                    predictions = model_parts[0](batch.samples)
                    loss = self.loss_fn.total(predictions, batch.targets)
                totals[0] += loss
                totals[1] += self.loss_fn.num_targets(batch.targets)
                totals[2] += len(batch)
                self.progress_subscriber.consume_eval_batch(dataloader.dataloader_tag, index + 1, len(dataloader))
                if stop_request is not None and stop_request.is_agreed():
                    return None
        if world_size() > 1:
            dist.all_reduce(totals)
        loss_sum, num_targets, num_samples = totals.tolist()
        return EvaluationResultBatch(
            dataloader.dataloader_tag,
            num_train_steps_done,
            losses={self.loss_fn.tag: loss_sum / num_targets},
            throughput_metrics={"evaluation_num_samples_per_second": num_samples / (time.perf_counter() - start)},
        )


class AutocastFactory:
    """Makes autocast contexts of one precision; a context of its own per forward pass.

    Args:
        device: Where the model is.
        dtype: Precision of computation, or None for none.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        self.device_type, self.dtype = device.type, dtype

    def __call__(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.dtype is not None)


@contextmanager
def _evaluating(model_parts: list[nn.Module]) -> Iterator[None]:
    for part in model_parts:
        part.eval()
    try:
        yield
    finally:
        for part in model_parts:
            part.train()
            if isinstance(part, FSDPModule):
                # a forward pass without a backward leaves the root's parameters whole
                part.reshard()
