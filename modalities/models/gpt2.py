"""A decoder-only transformer in the manner of GPT-2, with the choices that came after it.

Shape suffixes: B batch, T sequence, C width of the model, V vocabulary.
"""

# shape suffixes are capitals
# ruff: noqa: N803, N806

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from modalities.exceptions import UserError
from modalities.models.attention import CausalSelfAttention
from modalities.models.feed_forward import GELUFeedForward, SwiGLU
from modalities.models.key_value_cache import KeyValueCache, LayerCache
from modalities.models.norms import make_norm
from modalities.models.settings import (
    ActivationType,
    AttentionConfig,
    AttentionImplementation,
    LayerNormWrapperConfig,
    PositionTypes,
)


class GPT2Block(nn.Module):
    """Attention and feed-forward layer, each behind a norm and beside a residual connection.

    Args:
        attention_norm: Norm before attention.
        attn: The attention.
        ffn_norm: Norm before the feed-forward layer.
        mlp: The feed-forward layer.
    """

    def __init__(
        self, attention_norm: nn.Module, attn: CausalSelfAttention, ffn_norm: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.ffn_norm = ffn_norm
        self.attn = attn
        self.mlp = mlp

    def forward(self, hidden_BTC: Tensor, cache: LayerCache | None = None) -> Tensor:
        hidden_BTC = hidden_BTC + self.attn(self.attention_norm(hidden_BTC), cache)
        return hidden_BTC + self.mlp(self.ffn_norm(hidden_BTC))


class GPT2LLM(nn.Module):
    """The model: embedding, blocks, norm, head; see ``GPT2LLMConfig`` for the meaning of the fields.

    Attributes:
        weight_decay_groups: Regular expressions of parameter names, by group; every parameter is in exactly one.

    Raises:
        UserError: The attention implementation is not installed.
    """

    def __init__(
        self,
        sample_key: str,
        prediction_key: str,
        use_meta_device: bool | None,
        poe_type: PositionTypes,
        sequence_length: int,
        vocab_size: int,
        n_layer: int,
        n_head_q: int,
        n_head_kv: int,
        n_embd: int,
        ffn_hidden: int,
        dropout: float,
        bias: bool,
        attention_config: AttentionConfig,
        attention_implementation: AttentionImplementation,
        activation_type: ActivationType,
        attention_norm_config: LayerNormWrapperConfig,
        ffn_norm_config: LayerNormWrapperConfig,
        lm_head_norm_config: LayerNormWrapperConfig,
        use_weight_tying: bool,
        seed: int | None,
        enforce_swiglu_hidden_dim_multiple_of: int,
    ) -> None:
        super().__init__()
        self.sample_key = sample_key
        self.prediction_key = prediction_key
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.seed = seed
        self.weight_decay_groups = {
            "linear": [r"\.attn", r"\.mlp", r"\.lm_head\.weight"],
            "embedding": [r"\.wte", r"\.wpe"],
            "layernorm": [r"\.attention_norm", r"\.ffn_norm", r"\.lm_head_norm"],
        }

        def make_feed_forward() -> nn.Module:
            if activation_type is ActivationType.SWIGLU:
                return SwiGLU(n_embd, ffn_hidden, bias, dropout, enforce_swiglu_hidden_dim_multiple_of)
            return GELUFeedForward(n_embd, ffn_hidden, bias, dropout)

        def make_block() -> GPT2Block:
            attention = CausalSelfAttention(
                n_embd, n_head_q, n_head_kv, bias, dropout, attention_config, attention_implementation
            )
            return GPT2Block(
                make_norm(attention_norm_config), attention, make_norm(ffn_norm_config), make_feed_forward()
            )

        with _on_meta_device(bool(use_meta_device)), _seeded(seed):
            parts: dict[str, nn.Module] = {"wte": nn.Embedding(vocab_size, n_embd)}
            if poe_type is PositionTypes.ABSOLUTE:
                parts["wpe"] = nn.Embedding(sequence_length, n_embd)
            parts["drop"] = nn.Dropout(dropout)
            parts["h"] = nn.ModuleDict({str(index): make_block() for index in range(n_layer)})
            parts["lm_head_norm"] = make_norm(lm_head_norm_config)
            parts["lm_head"] = nn.Linear(n_embd, vocab_size, bias=False)
            self.transformer = nn.ModuleDict(parts)
        if use_weight_tying:
            self.transformer["lm_head"].weight = self.transformer["wte"].weight

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks, perhaps wrapped, from the first to the last."""
        return list(cast(nn.ModuleDict, self.transformer["h"]).values())

    def make_cache(self) -> KeyValueCache:
        """An empty cache for one batch of sequences."""
        return KeyValueCache(len(self.blocks), self.sequence_length)

    def forward(
        self, inputs: Mapping[str, Tensor] | Tensor, cache: KeyValueCache | None = None
    ) -> dict[str, Tensor] | Tensor:
        """Logits of each next token.

        Args:
            inputs: Token ids (B, T), or a mapping that holds them under ``sample_key``.
            cache: Of the tokens before these; the new ones are added to it.

        Returns:
            Logits (B, T, V), under ``prediction_key`` if the inputs were a mapping.

        Raises:
            UserError: The sequence is longer than ``sequence_length``.
        """
        if isinstance(inputs, Tensor):
            return self._logits(inputs, cache)
        return {self.prediction_key: self._logits(inputs[self.sample_key], cache)}

    def _logits(self, token_ids_BT: Tensor, cache: KeyValueCache | None) -> Tensor:
        start = 0 if cache is None else cache.length
        end = start + token_ids_BT.size(1)
        if end > self.sequence_length:
            raise UserError(
                f"a sequence of {end} tokens does not fit the model's sequence_length of {self.sequence_length}: "
                "shorten the samples, or enlarge model.sequence_length"
            )
        hidden_BTC = self.transformer["wte"](token_ids_BT)
        if "wpe" in self.transformer:
            positions_T = torch.arange(start, end, device=token_ids_BT.device)
            hidden_BTC = hidden_BTC + self.transformer["wpe"](positions_T)
        hidden_BTC = self.transformer["drop"](hidden_BTC)
        for index, block in enumerate(self.blocks):
            hidden_BTC = block(hidden_BTC) if cache is None else block(hidden_BTC, cache.layer(index))
        if cache is not None:
            cache.length = end
        logits_BTV: Tensor = self.transformer["lm_head"](self.transformer["lm_head_norm"](hidden_BTC))
        return logits_BTV


@contextmanager
def _on_meta_device(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    with torch.device("meta"):
        yield


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Draw from a generator of its own, so that the model is the same whatever was drawn before."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
