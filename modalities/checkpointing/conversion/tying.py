"""Tied weights in a checkpoint that does not tell them: two keys of a DCP folder with the same content."""

from __future__ import annotations

from collections.abc import Mapping

from modalities.checkpointing.conversion.lazy_tensor import digest_of
from modalities.checkpointing.reading.sources import MODEL_PREFIX, STATE_PREFIX, Form, TensorSource


def tied_in(source: TensorSource) -> dict[str, str]:
    """By key of a tied weight, the key of the weight that it is tied to; one tensor is in memory at a time.

    Where the source does not tell it, weights of two dimensions or more are tied if they are equal bit for bit, are no
    constant, and at most one of them has an optimizer state: an optimizer knows a tied weight once.
    """
    if source.kind != "dcp":
        return dict(source.tied)
    matrices = {
        key: form
        for key, form in source.forms.items()
        if form is not None and key.startswith(MODEL_PREFIX) and len(form.shape) > 1 and form.num_bytes
    }
    by_form: dict[Form, list[str]] = {}
    for key, form in matrices.items():
        by_form.setdefault(form, []).append(key)
    stepped = _with_state(source.forms)
    tied: dict[str, str] = {}
    for keys in by_form.values():
        # those that the optimizer knows first: they are what is kept
        ordered = sorted(keys, key=lambda key: key not in stepped)
        if len(ordered) < 2 or ordered[-1] in stepped:
            continue
        first: dict[str, str] = {}
        for key in ordered:
            digest = _digest_unless_constant(source, key)
            if digest is None:
                continue
            kept = first.setdefault(digest, key)
            if kept != key and key not in stepped:
                tied[key] = kept
    return tied


def _with_state(forms: Mapping[str, Form | None]) -> set[str]:
    """Keys of the model whose optimizer state is there."""
    states = (key.removeprefix(STATE_PREFIX) for key in forms if key.startswith(STATE_PREFIX))
    return {f"{MODEL_PREFIX}{key.rpartition('.')[0]}" for key in states}


def _digest_unless_constant(source: TensorSource, key: str) -> str | None:
    tensor = source.read(key)
    flat = tensor.reshape(-1)
    # a copy of a block at a time, not of all
    is_constant = all(bool((block == flat[0]).all()) for block in flat.split(1 << 20))
    return None if is_constant else digest_of(tensor)
