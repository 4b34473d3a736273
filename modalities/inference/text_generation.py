"""Generating tokens one by one.

Shape suffixes: T tokens, V vocabulary.
"""

# shape suffixes are capitals
# ruff: noqa: N803, N806

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from modalities.exceptions import UserError


class Cache(Protocol):
    """Keys and values of the tokens that a model has seen."""

    length: int

    def reset(self) -> None: ...


def generate_tokens(
    model: nn.Module,
    prompt_ids: list[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    end_of_document_id: int | None = None,
) -> Iterator[int]:
    """Continue a prompt; the ids come as they are drawn.

    The model sees the last ``sequence_length`` tokens at most: when they are full, it starts again from the last half
    of them.

    Args:
        model: Takes token ids (B, T) and a ``cache``, gives logits (B, T, V); has ``sequence_length``, ``vocab_size``
            and ``make_cache()``. It is in evaluation mode while tokens are drawn.
        prompt_ids: May be empty if there is an ``end_of_document_id`` to start from.
        max_new_tokens: Tokens to draw at most.
        temperature: The logits are divided by it; 0 takes the likeliest token.
        top_k: Draw among the k likeliest tokens.
        top_p: Draw among the fewest tokens whose probabilities add up to p (https://arxiv.org/abs/1904.09751).
        seed: Of the draws; torch's own generators stay as they are.
        end_of_document_id: Generation ends when it is drawn; it is not handed out.

    Raises:
        UserError: At the call, if an argument is out of range.
    """
    _check(model, prompt_ids, max_new_tokens, temperature, top_k, top_p, end_of_document_id)
    window = list(prompt_ids) if prompt_ids else [_start_id(end_of_document_id)]
    generator = torch.Generator("cpu").manual_seed(seed)

    def draw(logits_V: Tensor) -> int:
        return sample(logits_V, temperature, top_k, top_p, generator)

    return _generate(model, window, max_new_tokens, draw, end_of_document_id)


def sample(
    logits_V: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> int:
    """Draw one token id.

    Args:
        logits_V: (V,) on the CPU, in fp32.
        temperature: 0 takes the likeliest.
        top_k: Among so many.
        top_p: Among those that make up so much.
        generator: On the CPU.
    """
    if temperature == 0:
        return int(logits_V.argmax())
    sorted_V, ids_V = (logits_V / temperature).sort(descending=True, stable=True)
    if top_k is not None:
        sorted_V, ids_V = sorted_V[:top_k], ids_V[:top_k]
    probabilities_V = sorted_V.softmax(0)
    if top_p is not None:
        before_V = probabilities_V.cumsum(0) - probabilities_V
        # the likeliest token stays whatever p is
        before_V[0] = 0
        probabilities_V = probabilities_V.masked_fill(before_V >= top_p, 0)
    return int(ids_V[torch.multinomial(probabilities_V, 1, generator=generator)])


def _generate(
    model: Any, tokens: list[int], max_new_tokens: int, draw: Any, end_of_document_id: int | None
) -> Iterator[int]:
    was_training = model.training
    cache: Cache = model.make_cache()
    model.eval()
    try:
        longest = model.sequence_length
        fresh = tokens[-longest:]
        tokens = list(fresh)
        for _ in range(max_new_tokens):
            if cache.length + len(fresh) > longest:
                cache.reset()
                fresh = tokens = tokens[-max(1, longest // 2) :]
            token = draw(_last_logits(model, fresh, cache))
            if token == end_of_document_id:
                return
            tokens.append(token)
            fresh = [token]
            yield token
    finally:
        model.train(was_training)
        if isinstance(model, FSDPModule):
            # the root stays gathered after a forward without backward, out of the optimizer's reach
            model.reshard()


def _last_logits(model: nn.Module, token_ids: list[int], cache: Cache) -> Tensor:
    device = next(model.parameters()).device
    ids_BT = torch.tensor([token_ids], device=device)
    # a compiled block would be compiled anew for every length
    with torch.compiler.set_stance("force_eager"), _without_gradients(model):
        logits_BTV: Tensor = model(ids_BT, cache=cache)
    return logits_BTV[0, -1].float().cpu()


def _without_gradients(model: nn.Module) -> AbstractContextManager[None]:
    # weights gathered in inference mode would stay inference tensors, on which training cannot go on
    sharded = any(isinstance(module, FSDPModule | FSDP) for module in model.modules())
    return torch.no_grad() if sharded else torch.inference_mode()


def _start_id(end_of_document_id: int | None) -> int:
    if end_of_document_id is None:
        raise UserError("the prompt is empty, and there is no end_of_document_id to start from: give a prompt")
    return end_of_document_id


def _check(
    model: nn.Module,
    prompt_ids: list[int],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    end_of_document_id: int | None,
) -> None:
    if not callable(getattr(model, "make_cache", None)):
        raise UserError(f"{type(model).__name__} cannot generate text: it has no make_cache(), as GPT2LLM has")
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens is {max_new_tokens}; it must be at least 0")
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature is {temperature}; it must be a number of at least 0")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k is {top_k}; it must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p is {top_p}; it must be above 0 and at most 1")
    given = [*prompt_ids, *([] if end_of_document_id is None else [end_of_document_id])]
    vocab_size: Any = model.vocab_size
    outside = [token for token in given if not 0 <= token < vocab_size]
    if outside:
        raise UserError(
            f"token id {outside[0]} is outside the model's vocabulary of {vocab_size}: "
            "does the tokenizer belong to this model?"
        )
