"""Giving a model memory, buffers and norms, and checking that every weight was set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from modalities.exceptions import UserError
from modalities.parallel.parameter_names import clean_name
from modalities.parallel.process_group import fail_together, machine_device

Places = list[tuple[nn.Module, str]]


@contextmanager
def finished_parameters(model: nn.Module) -> Iterator[None]:
    """Hand over a model whose parameters are to be set; afterwards none may be unset.

    Before: meta tensors get memory, norms their ones and zeros, buffers their values, tied weights are tied again,
    and FSDP1's parameters are whole.

    Raises:
        UserError: On all ranks, if a parameter was not set or holds NaN.
    """
    materialize_(model)
    whole = any(isinstance(module, FSDP) for module in model.modules())
    with FSDP.summon_full_params(model, writeback=True) if whole else nullcontext():
        with torch.no_grad():
            for parameter in model.parameters():
                _local(parameter).fill_(float("nan"))
            reset_all_but_projections_(model)
        yield
        unset = [clean_name(name) for name, p in model.named_parameters() if _local(p).isnan().any()]
    fail_together(_unset_error(unset) if unset else None)


def materialize_(model: nn.Module) -> None:
    """Give meta tensors memory on the machine's device; their values are arbitrary, ties stay.

    Raises:
        UserError: A buffer that is not saved belongs to a module that cannot compute it anew.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return
    _require_computable_buffers(model)
    ties = _tied_places(model)
    model.to_empty(device=machine_device())
    for (owner, name), *others in ties:
        for module, other_name in others:
            setattr(module, other_name, getattr(owner, name))


def materialize_for_loading_(model: nn.Module) -> None:
    """Like :func:`materialize_`, with the values that no checkpoint holds, such as buffers that are not saved."""
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        materialize_(model)
        reset_all_but_projections_(model)


def reset_all_but_projections_(model: nn.Module) -> None:
    """Call ``reset_parameters`` on every module whose values are not drawn: norms, and whatever has buffers."""
    for module in model.modules():
        # their defaults are random: on shards they would depend on the number of ranks
        reset = getattr(module, "reset_parameters", None)
        if callable(reset) and not isinstance(module, nn.Linear | nn.Embedding):
            reset()


def _require_computable_buffers(model: nn.Module) -> None:
    lost = [
        clean_name(f"{prefix}.{name}")
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_meta and name in module._non_persistent_buffers_set and not hasattr(module, "reset_parameters")
    ]
    if lost:
        raise UserError(
            f"{', '.join(lost[:3])}: no checkpoint holds it, and a model on the meta device has no values for it; "
            "give its module a reset_parameters that computes it"
        )


def _tied_places(model: nn.Module) -> list[Places]:
    places: dict[int, Places] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places[id(parameter)].append((module, name))
    return [found for found in places.values() if len(found) > 1]


def _local(parameter: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def _unset_error(names: list[str]) -> UserError:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return UserError(
        f"model_initialized: the initialiser did not set, or set to NaN, {shown}; "
        "use one that covers every parameter of this model"
    )
