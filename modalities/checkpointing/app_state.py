"""Model, optimizer and learning-rate scheduler as one stateful whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from modalities.exceptions import CheckpointError
from modalities.parallel.parameter_names import without_wrappers

_FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)


class AppState(Stateful):
    """What a checkpoint brings back; saved as ``{"app": AppState}``.

    Args:
        model: The model, or its parts.
        optimizer: Over the model's parameters.
        lr_scheduler: Over the optimizer, if there is one.

    Attributes:
        rank_state: Further numbers of this rank that exact resuming needs; they travel beside the state dict.
    """

    def __init__(
        self, model: nn.Module | list[nn.Module], optimizer: Optimizer, lr_scheduler: LRScheduler | None = None
    ) -> None:
        self.model_parts = model if isinstance(model, list) else [model]
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.rank_state: dict[str, float] = {}
        self._is_loaded = False
        self._is_broken = False

    @property
    def model(self) -> nn.Module:
        """The model, if it has one part only."""
        (part,) = self.model_parts
        return part

    @property
    def is_loaded(self) -> bool:
        """Whether a checkpoint has been loaded into this state."""
        return self._is_loaded

    def mark_loaded(self) -> None:
        """Note that a checkpoint has been loaded.

        Raises:
            CheckpointError: One had been loaded already.
        """
        if self._is_loaded:
            raise CheckpointError(
                "a checkpoint has been loaded into this app state already; build a new one to load again"
            )
        self._is_loaded = True

    def mark_broken(self) -> None:
        """Note that loading broke off half way: this state is neither the old one nor that of the checkpoint."""
        self._is_broken = True

    def state_dict(self) -> dict[str, Any]:
        """Sharded state with the keys ``model``, ``optimizer`` and, with a scheduler, ``lr_scheduler``.

        Reading it does not change the training that follows.

        Raises:
            CheckpointError: Loading broke off half way.
        """
        if self._is_broken:
            raise CheckpointError("loading into this app state broke off half way: build a new one")
        state: dict[str, Any] = {"model": self.model_state_dict(), "optimizer": self._optimizer_state_dict()}
        if self.lr_scheduler is not None:
            state["lr_scheduler"] = self.lr_scheduler.state_dict()
        return state

    def model_state_dict(self) -> dict[str, Any]:
        """The part ``model`` of :meth:`state_dict`: sharded parameters and buffers by clean name."""
        state: dict[str, Any] = {}
        for part in self.model_parts:
            state |= {without_wrappers(key): value for key, value in get_model_state_dict(part).items()}
        return state

    def load_model_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of the form that :meth:`model_state_dict` gives."""
        for part in self.model_parts:
            own = {without_wrappers(key): key for key in get_model_state_dict(part)}
            model_state = {own.get(key, key): value for key, value in state_dict.items()}
            set_model_state_dict(part, model_state, options=StateDictOptions(strict=False))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of the form that :meth:`state_dict` gives.

        Raises:
            CheckpointError: A checkpoint has been loaded already.
        """
        self.mark_loaded()
        self.load_model_state_dict(state_dict["model"])
        for part in self.model_parts:
            own = {without_wrappers(key): key for key in get_model_state_dict(part)}
            optimizer_state = {_wrapped(key, own): value for key, value in state_dict["optimizer"].items()}
            set_optimizer_state_dict(part, self.optimizer, optimizer_state, options=_FLATTENED)
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(state_dict["lr_scheduler"])

    def _optimizer_state_dict(self) -> dict[str, Any]:
        # torch makes absent state by taking a step with zero gradients, which leaves Adam's step count at 1
        had_state = bool(self.optimizer.state)
        state: dict[str, Any] = {}
        for part in self.model_parts:
            state |= get_optimizer_state_dict(part, self.optimizer, options=_FLATTENED)
        if not had_state:
            for key, value in state.items():
                if key.startswith("state.") and isinstance(value, torch.Tensor):
                    _zero_(value)
            self.optimizer.state.clear()
        return {without_wrappers(key): value for key, value in state.items()}


def _wrapped(key: str, own: dict[str, str]) -> str:
    """An optimizer's key, such as ``state.NAME.exp_avg``, with the parameter's name as its wrappers have it."""
    kind, _, rest = key.partition(".")
    name, _, what = rest.rpartition(".")
    return f"{kind}.{own.get(name, name)}.{what}"


def _zero_(tensor: torch.Tensor) -> None:
    if hasattr(tensor, "local_shards"):
        for shard in tensor.local_shards():
            shard.tensor.zero_()
    else:
        tensor.zero_()


def make_app_state(
    model: nn.Module | list[nn.Module], optimizer: Optimizer, lr_scheduler: LRScheduler | None
) -> AppState:
    """Builder of ``app_state: raw``."""
    return AppState(model, optimizer, lr_scheduler)
