"""Optimizers over a model's weight-decay groups."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, AdamW

from modalities.config.suggestions import did_you_mean
from modalities.exceptions import UserError
from modalities.parallel.parameter_names import clean_name

FUSED_DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")
"""Where torch has a fused Adam."""


def make_adam(
    lr: float,
    wrapped_model: nn.Module | list[nn.Module],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    weight_decay_groups_excluded: list[str],
    foreach: bool | None,
    fused: bool | None,
) -> Adam:
    """Adam (https://arxiv.org/abs/1412.6980) over two parameter groups: with weight decay, then without.

    Raises:
        UserError: See :func:`parameter_groups`.
    """
    groups = parameter_groups(wrapped_model, weight_decay, weight_decay_groups_excluded)
    return Adam(groups, lr=lr, betas=betas, eps=eps, foreach=foreach, fused=_fused(groups, foreach, fused))


def make_adam_w(
    lr: float,
    wrapped_model: nn.Module | list[nn.Module],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    weight_decay_groups_excluded: list[str],
    foreach: bool | None,
    fused: bool | None,
) -> AdamW:
    """AdamW (https://arxiv.org/abs/1711.05101) over two parameter groups: with weight decay, then without.

    Raises:
        UserError: See :func:`parameter_groups`.
    """
    groups = parameter_groups(wrapped_model, weight_decay, weight_decay_groups_excluded)
    return AdamW(groups, lr=lr, betas=betas, eps=eps, foreach=foreach, fused=_fused(groups, foreach, fused))


def parameter_groups(
    model: nn.Module | list[nn.Module], weight_decay: float, excluded: list[str]
) -> list[dict[str, Any]]:
    """A model's trainable parameters, those with weight decay first; a group without parameters is left out.

    Args:
        model: One model, or parts; each has ``weight_decay_groups``: regular expressions of parameter names, by group.
        weight_decay: Of the first group; 0 in the second.
        excluded: Names of the model's groups that go to the second.

    Raises:
        UserError: An excluded group is unknown, a parameter is in none of the model's groups or in several, is on the
            meta device, or none is trainable.
    """
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for part in model if isinstance(model, list) else [model]:
        patterns = _weight_decay_groups(part, excluded)
        for name, parameter in part.named_parameters():
            if parameter.requires_grad:
                _check_has_memory(name, parameter)
                group = _group_of(clean_name(name), patterns)
                (spared if group in excluded else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    found = [group for group in groups if group["params"]]
    if not found:
        raise UserError("optimizer: the model has no trainable parameter")
    return found


def _weight_decay_groups(model: nn.Module, excluded: list[str]) -> dict[str, list[str]]:
    patterns: dict[str, list[str]] | None = getattr(model, "weight_decay_groups", None)
    if patterns is None:
        if not excluded:
            return {"all": [""]}
        raise UserError(
            f"weight_decay_groups_excluded names {', '.join(excluded)}, but {type(model).__name__} has no attribute "
            "weight_decay_groups (regular expressions of parameter names, by group): add it, or exclude nothing"
        )
    for name in excluded:
        if name not in patterns:
            hint = did_you_mean(name, patterns, "groups of this model")
            raise UserError(f"weight_decay_groups_excluded: the model has no group `{name}`; {hint}")
    return patterns


def _group_of(name: str, patterns: dict[str, list[str]]) -> str:
    found = [group for group, regexes in patterns.items() if any(re.search(regex, name) for regex in regexes)]
    if len(found) != 1:
        where = f"in several weight-decay groups ({', '.join(found)})" if found else "in no weight-decay group"
        raise UserError(f"parameter {name} is {where}; correct the model's weight_decay_groups: {patterns}")
    return found[0]


def _check_has_memory(name: str, parameter: nn.Parameter) -> None:
    if parameter.is_meta:
        raise UserError(
            f"optimizer: parameter {clean_name(name)} has no memory yet (meta device): let wrapped_model refer to the "
            "model_initialized component"
        )


def _fused(groups: list[dict[str, Any]], foreach: bool | None, fused: bool | None) -> bool | None:
    if fused is not None or foreach:
        return fused
    parameters: list[torch.Tensor] = [parameter for group in groups for parameter in group["params"]]
    able = all(p.device.type in FUSED_DEVICE_TYPES and p.is_floating_point() for p in parameters)
    return True if able else None
