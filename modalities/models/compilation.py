"""Compiling a model's blocks."""

from __future__ import annotations

from torch import nn

from modalities.parallel.parameter_names import blocks_by_class_name


def compile_blocks(
    model: nn.Module | list[nn.Module], block_names: list[str], fullgraph: bool | None, debug: bool | None
) -> nn.Module | list[nn.Module]:
    """Compile every block of the given class names, in place, so that parameters keep their names.

    Equal blocks share one compilation; it happens at the first forward.

    Args:
        model: One model, or several parts.
        block_names: Class names.
        fullgraph: Raise where the compiler would fall back to Python.
        debug: Have inductor write its trace.

    Raises:
        UserError: A name matches nothing.
    """
    options: dict[str, str | int | bool] | None = {"trace.enabled": True} if debug else None
    for part in model if isinstance(model, list) else [model]:
        for block in blocks_by_class_name(part, block_names):
            block.compile(fullgraph=bool(fullgraph), options=options)
    return model
