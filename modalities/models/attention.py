"""Causal self-attention with grouped queries.

Shape suffixes: B batch, T new tokens, S tokens attended to (S = T without a cache), C width of the model, H query
heads, K key-value heads, D width of a head.
"""

# shape suffixes are capitals
# ruff: noqa: N803, N806

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from modalities.exceptions import UserError
from modalities.models.key_value_cache import LayerCache
from modalities.models.norms import make_norm
from modalities.models.rotary import make_transform
from modalities.models.settings import AttentionConfig, AttentionImplementation


class CausalSelfAttention(nn.Module):
    """Each token attends to itself and to those before it.

    Args:
        n_embd: Width of the model.
        n_head_q: Query heads.
        n_head_kv: Key-value heads; each serves ``n_head_q / n_head_kv`` query heads (https://arxiv.org/abs/2305.13245).
        bias: Biases in the four projections.
        dropout: Probability, of attention weights and of outputs.
        attention_config: Transforms and norms of queries and keys.
        attention_implementation: Who computes attention.

    Raises:
        UserError: ``dao_flash`` without the package flash-attn.
    """

    def __init__(
        self,
        n_embd: int,
        n_head_q: int,
        n_head_kv: int,
        bias: bool,
        dropout: float,
        attention_config: AttentionConfig,
        attention_implementation: AttentionImplementation,
    ) -> None:
        super().__init__()
        if attention_implementation is AttentionImplementation.DAO_FLASH:
            _require_flash_attn()
        self.head_width = n_embd // n_head_q
        self.grouped = n_head_kv != n_head_q
        self.dropout = dropout
        self.implementation = attention_implementation
        self.q_attn = nn.Linear(n_embd, n_embd, bias=bias)
        self.k_attn = nn.Linear(n_embd, n_head_kv * self.head_width, bias=bias)
        self.v_attn = nn.Linear(n_embd, n_head_kv * self.head_width, bias=bias)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=bias)
        self.resid_dropout = nn.Dropout(dropout)
        self.qkv_transforms = nn.ModuleList(map(make_transform, attention_config.qkv_transforms))
        norm = attention_config.qk_norm_config
        self.q_norm = make_norm(norm) if norm is not None else None
        self.k_norm = make_norm(norm) if norm is not None else None

    def forward(self, inputs_BTC: Tensor, cache: LayerCache | None = None) -> Tensor:
        """Attend; with a cache, to the tokens in it as well, and add the new ones to it."""
        start = 0 if cache is None else cache.length
        queries_BHTD = self._split_heads(self.q_attn(inputs_BTC))
        keys_BKTD = self._split_heads(self.k_attn(inputs_BTC))
        values_BKTD = self._split_heads(self.v_attn(inputs_BTC))
        for transform in self.qkv_transforms:
            queries_BHTD, keys_BKTD, values_BKTD = transform(queries_BHTD, keys_BKTD, values_BKTD, start)
        if self.q_norm is not None and self.k_norm is not None:
            queries_BHTD, keys_BKTD = self.q_norm(queries_BHTD), self.k_norm(keys_BKTD)
        if cache is not None:
            keys_BKTD, values_BKTD = cache.append(keys_BKTD, values_BKTD)
        outputs_BTC = self._attend(queries_BHTD, keys_BKTD, values_BKTD, start).transpose(1, 2).flatten(2)
        return self.resid_dropout(self.c_proj(outputs_BTC))

    def _split_heads(self, inputs_BTC: Tensor) -> Tensor:
        return inputs_BTC.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def _attend(self, queries_BHTD: Tensor, keys_BKSD: Tensor, values_BKSD: Tensor, start: int) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if self.implementation is AttentionImplementation.MANUAL:
            return attend_by_hand(queries_BHTD, keys_BKSD, values_BKSD, start, dropout)
        if self.implementation is AttentionImplementation.DAO_FLASH:
            return _attend_by_flash_attn(queries_BHTD, keys_BKSD, values_BKSD, dropout)
        # is_causal lets the kernel skip the upper half without a mask, but it knows sequences from their start only
        return functional.scaled_dot_product_attention(
            queries_BHTD,
            keys_BKSD,
            values_BKSD,
            attn_mask=None if start == 0 else causal_mask(queries_BHTD.size(-2), start, queries_BHTD.device),
            dropout_p=dropout,
            is_causal=start == 0,
            enable_gqa=self.grouped,
        )


def causal_mask(num_queries: int, start: int, device: torch.device) -> Tensor:
    """(T, S) booleans, true where the query at ``start + t`` may see the key at ``s``; S = start + T."""
    return torch.ones(num_queries, start + num_queries, dtype=torch.bool, device=device).tril(start)


def attend_by_hand(queries_BHTD: Tensor, keys_BKSD: Tensor, values_BKSD: Tensor, start: int, dropout: float) -> Tensor:
    """Attention as it stands in the textbook; gives (B, H, T, D)."""
    num_groups = queries_BHTD.size(1) // keys_BKSD.size(1)
    keys_BHSD = keys_BKSD.repeat_interleave(num_groups, dim=1)
    values_BHSD = values_BKSD.repeat_interleave(num_groups, dim=1)
    scores_BHTS = queries_BHTD @ keys_BHSD.transpose(-2, -1) / math.sqrt(queries_BHTD.size(-1))
    mask_TS = causal_mask(queries_BHTD.size(-2), start, queries_BHTD.device)
    weights_BHTS = scores_BHTS.masked_fill(~mask_TS, float("-inf")).softmax(dim=-1)
    return functional.dropout(weights_BHTS, dropout, training=dropout > 0) @ values_BHSD


def _attend_by_flash_attn(queries_BHTD: Tensor, keys_BKSD: Tensor, values_BKSD: Tensor, dropout: float) -> Tensor:
    from flash_attn import flash_attn_func

    # it wants (B, T, H, D), and aligns the causal mask at the last token: right for a cache too
    outputs_BTHD: Tensor = flash_attn_func(
        queries_BHTD.transpose(1, 2),
        keys_BKSD.transpose(1, 2),
        values_BKSD.transpose(1, 2),
        dropout_p=dropout,
        causal=True,
    )
    return outputs_BTHD.transpose(1, 2)


def _require_flash_attn() -> None:
    if importlib.util.find_spec("flash_attn") is None:
        raise UserError(
            "attention_implementation is dao_flash, but the package flash-attn is not installed: install it, "
            "or set attention_implementation to pytorch_flash"
        )
