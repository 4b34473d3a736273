"""The full state of an FSDP1 model and of its optimizer on rank 0, one unit at a time.

A unit is what FSDP1 shards together: a block, or what is left over for the root. Its parameters, and the paddings between
them, lie in one flat parameter; each rank of a shard group holds an equal slice of that. An optimizer state such as
``exp_avg`` is made of parts, one for each parameter that reaches into the rank's slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._runtime_utils import _lazy_init
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from modalities.exceptions import CheckpointError
from modalities.parallel.parameter_names import clean_name
from modalities.parallel.process_group import global_rank, on_rank_zero

_GATHERED_BYTES = 8 << 20
"""Gathered at a time, over all ranks; gloo holds as much again."""


@dataclass(frozen=True, eq=False)
class TensorSpec:
    """A dense tensor of a full state, without its content; tied tensors have one and the same.

    Args:
        shape: Sizes.
        stride: In elements.
        dtype: Type.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class FullState:
    """A full state as rank 0 has it, its tensors yet to be gathered.

    Args:
        tree: The nested state with a :class:`TensorSpec` for each tensor; complete on rank 0 only.
        steps: What is gathered in what order; the collective ones are the same on all ranks of rank 0's shard group.
    """

    def __init__(self, tree: dict[str, Any], steps: Sequence[_Whole | _Gathering]) -> None:
        self.tree = tree
        self._steps = steps

    @property
    def specs(self) -> list[TensorSpec]:
        """Every tensor in the order of :meth:`payloads`; complete on rank 0 only."""
        return [spec for step in self._steps for spec in step.specs]

    def payloads(self) -> Iterator[Tensor]:
        """The elements of each tensor, flat, on the CPU, as they lie in memory.

        All ranks must exhaust it; on ranks other than 0 it is empty, but takes part in the gathering. A tensor is valid
        until the next one is asked for.
        """
        room = _Room()
        for step in self._steps:
            yield from step.payloads(room)


def full_model_state(model: FSDP) -> FullState:
    """The parameters and persistent buffers of a whole model by clean name; all ranks must call it."""
    tree: dict[str, Any] = {}
    steps: list[_Whole | _Gathering] = []
    for unit in _units_of(model):
        gathering = _Gathering(unit, unit.dtype, [(0, unit.local)])
        for parameter in unit.parameters:
            tree |= dict.fromkeys(parameter.names, gathering.add(parameter))
        steps.append(gathering)
    rest = _Whole()
    for name, tensor in _tensors_outside_units(model, tree).items():
        tree[name] = rest.add(tensor)
    return FullState(tree, [*steps, rest])


def full_optimizer_state(model: FSDP, optimizer: Optimizer) -> FullState:
    """The state of a whole optimizer by clean parameter name; all ranks must call it.

    A parameter that was never stepped has none. A tied parameter goes by its first name.

    Raises:
        CheckpointError: The ranks have states of a parameter that do not fit together.
    """
    units = _units_of(model)
    packed = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own_states = {id(parameters[index]): state for index, state in packed["state"].items()}
    names = {id(parameter.tensor): parameter.names[0] for unit in units for parameter in unit.parameters}
    groups = [
        {**group, "params": [names[id(parameters[index])] for index in group["params"]]}
        for group in packed["param_groups"]
    ]
    described = [_described(unit, own_states) for unit in units]
    merged: list[list[dict[str, Any] | None]] = []

    def merge() -> list[list[tuple[str, torch.dtype]]]:
        merged.extend([_merged(unit, of_ranks) for unit, of_ranks in zip(units, described, strict=True)])
        return [_sharded_in(of_unit) for of_unit in merged]

    steps: list[_Whole | _Gathering] = []
    states: dict[str, Any] = {}
    for index, (unit, sharded) in enumerate(zip(units, on_rank_zero(merge), strict=True)):
        whole = _Whole()
        gatherings = {
            (key, dtype): _Gathering(unit, dtype, _parts(unit, own_states, key, dtype)) for key, dtype in sharded
        }
        if merged:
            for parameter, state in zip(unit.parameters, merged[index], strict=True):
                if state is not None:
                    states[parameter.names[0]] = {
                        key: gatherings[key, value.dtype].add(parameter)
                        if isinstance(value, _Slice)
                        else whole.add_all(value)
                        for key, value in state.items()
                    }
        steps += [whole, *gatherings.values()]
    options = _Whole()
    return FullState({"state": states, "param_groups": options.add_all(groups)}, [*steps, options])


@dataclass(frozen=True, eq=False)
class _Parameter:
    """A parameter of a unit.

    Args:
        names: Clean; several if it is tied, the first one first.
        tensor: This rank's part of it.
        shape: Of the whole.
        stride: Of the whole.
        start: Where it starts in the flat parameter.
        start_in_slice: Where this rank's part of it starts in its slice; None if there is no such part.
    """

    names: list[str]
    tensor: nn.Parameter
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    start_in_slice: int | None

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()


class _Unit:
    """What is sharded together.

    Args:
        handle: FSDP1's.
        prefixes: Names of the module in the model; several if it is used at several places.
    """

    def __init__(self, handle: FlatParamHandle, prefixes: Sequence[str]) -> None:
        flat: Any = handle.flat_param
        if not handle._skipped_use_sharded_views:
            # as FSDP1 does before it gathers: a parameter whose memory was replaced goes into the flat one
            handle._reset_flat_param_grad_info_if_needed()
            handle._writeback_orig_params()
        self.device = handle.device
        self.local: Tensor = flat._local_shard.detach()
        self.dtype = self.local.dtype
        self.is_sharded: bool = handle.uses_sharded_strategy
        self.group = handle.process_group
        self.ranks = dist.get_process_group_ranks(self.group) if self.is_sharded else [global_rank()]
        self.parameters = list(_parameters_of(flat, prefixes))

    def gather(self, parts: Sequence[tuple[int, Tensor]], dtype: torch.dtype, room: _Room) -> Tensor | None:
        """The flat whole on rank 0, on the CPU; None elsewhere.

        Args:
            parts: Of this rank's slice: where each starts in it, and its elements, flat. The rest is undefined.
            dtype: Of the parts.
            room: Holds the whole.
        """
        if 0 not in self.ranks:
            return None
        if not self.is_sharded:
            return parts[0][1].cpu()
        receives = global_rank() == 0
        num_ranks, num_elements = len(self.ranks), self.local.numel()
        whole = room.flat(num_ranks * num_elements, dtype) if receives else None
        step = max(1, _GATHERED_BYTES // (num_ranks * dtype.itemsize))
        for start in range(0, num_elements, step):
            stop = min(start + step, num_elements)
            piece = _piece(parts, start, stop, dtype, self.device).view(torch.uint8)
            if whole is None:
                dist.gather(piece, dst=0, group=self.group)
                continue
            slices = whole.view(num_ranks, num_elements).unbind()
            places = [of_rank[start:stop].view(torch.uint8) for of_rank in slices]
            received = places if piece.device.type == "cpu" else [torch.empty_like(piece) for _ in places]
            dist.gather(piece, received, dst=0, group=self.group)
            if received is not places:
                for place, from_rank in zip(places, received, strict=True):
                    place.copy_(from_rank)
        return whole


class _Room:
    """Memory on the CPU that one unit after the other is gathered into."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def flat(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Undefined elements; those given out before are overwritten."""
        num_bytes = num_elements * dtype.itemsize
        if num_bytes > self._bytes.numel():
            del self._bytes  # else both would be there for a moment
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        return self._bytes[:num_bytes].view(dtype)


@dataclass
class _Whole:
    """Tensors that rank 0 has already.

    Args:
        tensors: On any device.
        specs: One for each.
    """

    tensors: list[Tensor] = field(default_factory=list)
    specs: list[TensorSpec] = field(default_factory=list)

    def add(self, tensor: Tensor) -> TensorSpec:
        # the stride of a copy: the tensor's own if its elements lie densely
        spec = TensorSpec(tuple(tensor.shape), torch.empty_like(tensor, device="meta").stride(), tensor.dtype)
        self.tensors.append(tensor.detach())
        self.specs.append(spec)
        return spec

    def add_all(self, value: Any) -> Any:
        """A value with a spec in place of each tensor in it."""
        return tree_map_only(Tensor, self.add, value)

    def payloads(self, room: _Room) -> Iterator[Tensor]:
        if global_rank() == 0:
            for tensor, spec in zip(self.tensors, self.specs, strict=True):
                dense = tensor.cpu() if tensor.stride() == spec.stride else tensor.cpu().clone()
                yield dense.as_strided((dense.numel(),), (1,))


@dataclass
class _Gathering:
    """A unit's parameters, or their optimizer states of one key and type, to be gathered.

    Args:
        unit: The unit.
        dtype: Of the elements.
        parts: This rank's; see :meth:`_Unit.gather`.
        wanted: The parameters that have such a tensor; the others' elements are undefined.
        specs: One for each of them.
    """

    unit: _Unit
    dtype: torch.dtype
    parts: Sequence[tuple[int, Tensor]]
    wanted: list[_Parameter] = field(default_factory=list)
    specs: list[TensorSpec] = field(default_factory=list)

    def add(self, parameter: _Parameter) -> TensorSpec:
        spec = TensorSpec(parameter.shape, parameter.stride, self.dtype)
        self.wanted.append(parameter)
        self.specs.append(spec)
        return spec

    def payloads(self, room: _Room) -> Iterator[Tensor]:
        whole = self.unit.gather(self.parts, self.dtype, room)
        if whole is not None:
            for parameter in self.wanted:
                yield whole[parameter.start : parameter.start + parameter.num_elements]


@dataclass(frozen=True)
class _Slice:
    """What a rank has of a sharded tensor of the optimizer's.

    Args:
        dtype: Its type.
        num_elements: How many of the parameter's elements.
    """

    dtype: torch.dtype
    num_elements: int = field(compare=False)


def _units_of(model: FSDP) -> list[_Unit]:
    """In the order of the model, which is the same on all ranks."""
    _lazy_init(model, model)
    prefixes: dict[FlatParamHandle, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, FSDP) and module._handle is not None:
            prefixes.setdefault(module._handle, []).append(name)
    return [_Unit(handle, names) for handle, names in prefixes.items()]


def _parameters_of(flat: Any, prefixes: Sequence[str]) -> Iterator[_Parameter]:
    """The parameters in a flat one, in its order."""
    names = {name: [name] for name in flat._fqns}
    for shared in flat._shared_param_infos:
        first = _joined(shared.prim_module_name, shared.prim_param_name)
        names[first].append(_joined(shared.module_name, shared.param_name))
    starts, start = [], 0
    for num_elements, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            starts.append(start)
        start += num_elements
    columns = (flat._fqns, flat._params, flat._shapes, flat._strides, starts, flat._shard_param_infos)
    for name, tensor, shape, stride, start, info in zip(*columns, strict=True):
        all_names = [clean_name(_joined(prefix, alias)) for prefix in prefixes for alias in names[name]]
        start_in_slice = info.offset_in_shard if info.in_shard else None
        yield _Parameter(all_names, tensor, tuple(shape), tuple(stride), start, start_in_slice)


def _tensors_outside_units(model: FSDP, known: Mapping[str, Any]) -> dict[str, Tensor]:
    """Persistent buffers, and parameters that FSDP1 was told to ignore, by clean name."""
    tensors: dict[str, Tensor] = {}
    original_dtypes = model._buffer_name_to_orig_dtype if model._mixed_precision_enabled_for_buffers() else {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            full_name = clean_name(_joined(prefix, name))
            if tensor is None or name in module._non_persistent_buffers_set or full_name in known:
                continue
            if tensor.is_floating_point():
                tensor = tensor.to(original_dtypes.get(full_name, tensor.dtype))
            tensors[full_name] = tensor
    return tensors


def _piece(
    parts: Sequence[tuple[int, Tensor]], start: int, stop: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A range of a rank's slice; a copy only where it is made of several parts."""
    for first, part in parts:
        if first <= start and stop <= first + part.numel():
            return part[start - first : stop - first].to(device)
    piece = torch.empty(stop - start, dtype=dtype, device=device)
    for first, part in parts:
        low, high = max(start, first), min(stop, first + part.numel())
        if low < high:
            piece[low - start : high - start].copy_(part[low - first : high - first])
    return piece


def _parts(
    unit: _Unit, own_states: Mapping[int, Mapping[str, Any]], key: str, dtype: torch.dtype
) -> list[tuple[int, Tensor]]:
    """What this rank's slice of a unit's optimizer state is made of."""
    parts = []
    for parameter in unit.parameters:
        value = own_states.get(id(parameter.tensor), {}).get(key)
        if parameter.start_in_slice is not None and _is_sharded(value) and value.dtype == dtype:
            parts.append((parameter.start_in_slice, value.detach().reshape(-1)))
    return parts


def _described(unit: _Unit, own_states: Mapping[int, Mapping[str, Any]]) -> list[list[dict[str, Any] | None]]:
    """What the ranks of rank 0's shard group have of each parameter's state, on rank 0; None for nothing."""
    own: list[dict[str, Any] | None] = []
    for parameter in unit.parameters:
        state = own_states.get(id(parameter.tensor))
        if state is not None and unit.is_sharded:
            # without a part of the parameter, what the optimizer keeps for it means nothing
            state = None if parameter.start_in_slice is None else _outline(state)
        own.append(None if state is None else dict(state))
    if not unit.is_sharded:
        return [own]
    of_ranks: list[Any] = [None] * len(unit.ranks) if global_rank() == 0 else []
    if 0 in unit.ranks:
        dist.gather_object(own, of_ranks or None, dst=0, group=unit.group)
    return of_ranks


def _outline(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _Slice(value.dtype, value.numel())
        if _is_sharded(value)
        else tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)
        for key, value in state.items()
    }


def _is_sharded(value: Any) -> TypeGuard[Tensor]:
    """Whether a value of a sharded parameter's state is sharded like it; FSDP1 takes all but scalars for such."""
    return isinstance(value, Tensor) and value.dim() > 0


def _merged(unit: _Unit, of_ranks: Sequence[Sequence[dict[str, Any] | None]]) -> list[dict[str, Any] | None]:
    """The state of each parameter, from what the ranks have of it."""
    merged: list[dict[str, Any] | None] = []
    for parameter, states in zip(unit.parameters, zip(*of_ranks, strict=True), strict=True):
        state: dict[str, Any] = {}
        found: Counter[str] = Counter()
        for key, value in [item for own in states if own is not None for item in own.items()]:
            if not _equal(state.setdefault(key, value), value):
                raise CheckpointError(f"the optimizer's {key} of {parameter.names[0]} differs among the ranks")
            if isinstance(value, _Slice):
                found[key] += value.num_elements
        for key, num_elements in found.items():
            if num_elements != parameter.num_elements:
                raise CheckpointError(
                    f"the optimizer's {key} of {parameter.names[0]} has {num_elements} elements on all ranks together, "
                    f"the parameter {parameter.num_elements}"
                )
        merged.append(None if all(own is None for own in states) else state)
    return merged


def _sharded_in(states: Sequence[Mapping[str, Any] | None]) -> list[tuple[str, torch.dtype]]:
    """Key and type of the sharded tensors in a unit's states, in their order."""
    keys: dict[Hashable, tuple[str, torch.dtype]] = {
        (key, value.dtype): (key, value.dtype)
        for state in states
        if state is not None
        for key, value in state.items()
        if isinstance(value, _Slice)
    }
    return list(keys.values())


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
