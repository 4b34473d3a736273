"""Learning-rate schedules in closed form: the rate depends on the number of steps done and on nothing else.

So a run that resumes with its step count resumes exactly. A state dict holds plain numbers, strings, lists and dicts.
Only its step count is taken: where other entries differ from the config's, the config's count, with a warning. It is
to be loaded after the optimizer's, whose groups it corrects.
"""

from __future__ import annotations

import logging
import math
import warnings
from abc import abstractmethod
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from modalities.exceptions import UserError
from modalities.optim.settings import AnnealStrategy

logger = logging.getLogger(__name__)

PROGRESS_KEYS = ("last_epoch", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step")
CYCLE_KEYS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")


class ClosedFormLR(LRScheduler):
    """Base of schedules given by a formula.

    Args:
        optimizer: Whose rate is set.
        last_epoch: Last step done, -1 for a fresh start; else the optimizer's groups must hold their ``initial_lr``.

    Raises:
        UserError: The groups hold none.
    """

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        _check_resumable(optimizer, last_epoch, ("initial_lr",))
        super().__init__(optimizer, last_epoch)

    @abstractmethod
    def rate(self, step: int, base_lr: float) -> float:
        """Learning rate after ``step`` steps.

        Args:
            step: Steps done.
            base_lr: The optimizer's own rate.
        """

    def get_lr(self) -> list[Any]:
        return [self.rate(self.last_epoch, float(base_lr)) for base_lr in self.base_lrs]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        _load_progress(self, state_dict)
        _apply(self, self.get_lr())


class DummyLR(ClosedFormLR):
    """The optimizer's rate throughout."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)

    def rate(self, step: int, base_lr: float) -> float:
        return base_lr


class StepLR(ClosedFormLR):
    """base * gamma ^ floor(step / step_size)."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float, last_epoch: int) -> None:
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def rate(self, step: int, base_lr: float) -> float:
        return base_lr * self.gamma ** (step // self.step_size)


class ConstantLR(ClosedFormLR):
    """base * factor before ``total_iters`` steps, base from then on."""

    def __init__(self, optimizer: Optimizer, factor: float, total_iters: int, last_epoch: int) -> None:
        self.factor = factor
        self.total_iters = total_iters
        super().__init__(optimizer, last_epoch)

    def rate(self, step: int, base_lr: float) -> float:
        return base_lr * self.factor if step < self.total_iters else base_lr


class LinearLR(ClosedFormLR):
    """base times a factor that goes linearly from ``start_factor`` to ``end_factor`` in ``total_iters`` steps."""

    def __init__(
        self, optimizer: Optimizer, start_factor: float, end_factor: float, total_iters: int, last_epoch: int
    ) -> None:
        self.start_factor = start_factor
        self.end_factor = end_factor
        self.total_iters = total_iters
        super().__init__(optimizer, last_epoch)

    def rate(self, step: int, base_lr: float) -> float:
        share = min(step, self.total_iters) / self.total_iters
        return base_lr * (self.start_factor + (self.end_factor - self.start_factor) * share)


class CosineAnnealingLR(ClosedFormLR):
    """eta_min + (base - eta_min) * (1 + cos(pi * step / t_max)) / 2 (https://arxiv.org/abs/1608.03983, no restarts)."""

    def __init__(self, optimizer: Optimizer, t_max: int, eta_min: float, last_epoch: int) -> None:
        # named as in torch's state dict
        self.T_max = t_max
        self.eta_min = eta_min
        super().__init__(optimizer, last_epoch)

    def rate(self, step: int, base_lr: float) -> float:
        return between(base_lr, self.eta_min, step / self.T_max)


class LinearWarmupCosineAnnealingLR(ClosedFormLR):
    """Linearly from ``initial_lr`` to ``max_lr`` in ``warmup_steps``, then along half a cosine.

    It reaches ``final_lr`` at ``total_steps`` and stays there. The rates are absolute: the optimizer's own does not
    count.

    Raises:
        UserError: The warm-up is longer than the whole.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int,
        total_steps: int,
        initial_lr: float,
        final_lr: float,
        max_lr: float,
        last_epoch: int,
    ) -> None:
        if warmup_steps > total_steps:
            raise UserError(f"scheduler: warmup_steps {warmup_steps} is more than total_steps {total_steps}")
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.initial_lr = initial_lr
        self.final_lr = final_lr
        self.max_lr = max_lr
        super().__init__(optimizer, last_epoch)

    def rate(self, step: int, base_lr: float) -> float:
        if step < self.warmup_steps:
            return self.initial_lr + (self.max_lr - self.initial_lr) * step / self.warmup_steps
        if step >= self.total_steps:
            return self.final_lr
        return between(self.max_lr, self.final_lr, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))


class OneCycleLR(lr_scheduler.OneCycleLR):
    """Torch's one-cycle schedule (https://arxiv.org/abs/1708.07120).

    Torch keeps the cycle's rates in the optimizer's groups, where a loaded optimizer state would replace them.

    Raises:
        UserError: Resumed without the groups' rates, or stepped more than ``total_steps`` times.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | list[float],
        total_steps: int | None,
        epochs: int | None,
        steps_per_epoch: int | None,
        pct_start: float,
        anneal_strategy: AnnealStrategy,
        cycle_momentum: bool,
        base_momentum: float | list[float],
        max_momentum: float | list[float],
        div_factor: float,
        final_div_factor: float,
        three_phase: bool,
        last_epoch: int,
    ) -> None:
        _check_resumable(optimizer, last_epoch, ("initial_lr", "max_lr", "min_lr"))
        self._check_lists(optimizer, max_lr=max_lr, base_momentum=base_momentum, max_momentum=max_momentum)
        num_steps = total_steps if total_steps is not None else (epochs or 0) * (steps_per_epoch or 0)
        if pct_start * num_steps == 1:
            # torch divides by the length of the rise, which would be zero steps
            pct_start = math.nextafter(pct_start, 2)
        super().__init__(
            optimizer,
            max_lr,
            total_steps=total_steps,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            pct_start=float(pct_start),
            anneal_strategy=anneal_strategy.value,
            cycle_momentum=cycle_momentum,
            base_momentum=base_momentum,
            max_momentum=max_momentum,
            div_factor=div_factor,
            final_div_factor=final_div_factor,
            three_phase=three_phase,
            last_epoch=last_epoch,
        )
        self._cycles = [{key: group[key] for key in CYCLE_KEYS if key in group} for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "_cycles"}

    def get_lr(self) -> list[Any]:
        if self.last_epoch > self.total_steps:
            raise UserError(
                f"scheduler onecycle_lr: step {self.last_epoch} lies beyond total_steps {self.total_steps}; "
                "make total_steps at least settings.training_target.num_target_steps"
            )
        return super().get_lr()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        _load_progress(self, state_dict)
        for group, cycle in zip(self.optimizer.param_groups, self._cycles, strict=True):
            group.update(cycle)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="To get the last learning rate")
            _apply(self, self.get_lr())

    @staticmethod
    def _check_lists(optimizer: Optimizer, **values: float | list[float]) -> None:
        for name, value in values.items():
            if isinstance(value, list) and len(value) != len(optimizer.param_groups):
                raise UserError(
                    f"scheduler onecycle_lr: {name} has {len(value)} values, but the optimizer has "
                    f"{len(optimizer.param_groups)} parameter groups"
                )


def between(start: float, end: float, share: float) -> float:
    """From ``start`` to ``end`` along half a cosine, ``share`` of the way."""
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def advance_(scheduler: LRScheduler, num_steps: int) -> None:
    """Step a schedule until so many steps are done, with no step of the optimizer in between.

    Args:
        scheduler: Its optimizer's groups hold the rates of where it stands.
        num_steps: Where to.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
        while scheduler.last_epoch < num_steps:
            scheduler.step()


def is_told_by_steps(scheduler: LRScheduler) -> bool:
    """Whether the number of steps done is all of its state."""
    return isinstance(scheduler, ClosedFormLR | OneCycleLR)


def _check_resumable(optimizer: Optimizer, last_epoch: int, keys: tuple[str, ...]) -> None:
    absent = [key for key in keys if last_epoch != -1 and any(key not in group for group in optimizer.param_groups)]
    if absent:
        raise UserError(
            f"scheduler: last_epoch is {last_epoch}, but the optimizer's groups hold no {', '.join(absent)}: load the "
            "optimizer's checkpoint first, or set last_epoch to -1"
        )


def _load_progress(scheduler: LRScheduler, state_dict: dict[str, Any]) -> None:
    own = scheduler.state_dict()
    for key, value in state_dict.items():
        if key not in PROGRESS_KEYS and key in own and own[key] != value:
            logger.warning("scheduler: the checkpoint has %s %s; the config's %s is used", key, value, own[key])
    scheduler.last_epoch = state_dict["last_epoch"]
    scheduler._step_count = state_dict.get("_step_count", state_dict["last_epoch"] + 1)


def _apply(scheduler: LRScheduler, rates: list[float]) -> None:
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = list(rates)
