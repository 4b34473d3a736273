"""Names of parameters and classes, freed of what wrappers add to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule

from modalities.config.suggestions import did_you_mean
from modalities.exceptions import UserError

_WRAPPER_PARTS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def clean_name(name: str) -> str:
    """A parameter's name as the unwrapped model has it, whether FSDP1, compile, checkpointing or DDP wrapped it."""
    return without_wrappers(name).removeprefix("module.")


def without_wrappers(key: str) -> str:
    """A key of a state dict without what FSDP1, compile and checkpointing put into it."""
    for part in _WRAPPER_PARTS:
        key = key.replace(part, "")
    return key


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """The clean name of each of a whole model's names; DDP's ``module.`` goes where all of them begin with it."""
    clean = {name: without_wrappers(name) for name in names}
    if clean and all(name.startswith("module.") for name in clean.values()):
        return {name: clean_name(name) for name in clean}
    return clean


def class_name(module: nn.Module) -> str:
    """A module's class name; the prefix that ``fully_shard`` gives a class is left out."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name


def blocks_by_class_name(model: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """The modules inside a model, in its order, whose class has one of the names.

    Raises:
        UserError: A name matches nothing.
    """
    wanted = list(names)
    counts = Counter(class_name(module) for module in model.modules())
    for name in wanted:
        if name not in counts:
            present = ", ".join(f"{known} ({count})" for known, count in counts.items())
            hint = did_you_mean(name, counts, "classes")
            raise UserError(f"block_names: the model has no module of class `{name}`; {hint}\nIt has: {present}")
    return [module for module in model.modules() if class_name(module) in wanted]
