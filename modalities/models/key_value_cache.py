"""Keys and values of the tokens that a model has seen, for decoding token by token.

Shape suffixes: L layers, B batch, K key-value heads, S longest sequence, T new tokens, D width of a head.
"""

# shape suffixes are capitals
# ruff: noqa: N803

from __future__ import annotations

from torch import Tensor


class KeyValueCache:
    """Room for the keys and values of ``max_length`` tokens in every layer.

    The memory, (L, B, K, S, D) twice, is taken at the first token, of the type and on the device that the model
    computes with.

    Args:
        num_layers: Number of layers.
        max_length: Longest sequence, in tokens.
    """

    def __init__(self, num_layers: int, max_length: int) -> None:
        self.num_layers = num_layers
        self.max_length = max_length
        self.length = 0
        self._keys_LBKSD: Tensor | None = None
        self._values_LBKSD: Tensor | None = None

    def reset(self) -> None:
        """Forget all tokens, keep the memory."""
        self.length = 0

    def layer(self, index: int) -> LayerCache:
        return LayerCache(self, index)

    def append(self, layer: int, keys_BKTD: Tensor, values_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens of one layer; ``length`` is to be advanced once all layers have.

        Returns:
            Keys and values of all tokens so far, (B, K, length + T, D) each.
        """
        if self._keys_LBKSD is None or self._values_LBKSD is None:
            batch, heads, _, width = keys_BKTD.shape
            shape = (self.num_layers, batch, heads, self.max_length, width)
            self._keys_LBKSD, self._values_LBKSD = keys_BKTD.new_empty(shape), values_BKTD.new_empty(shape)
        end = self.length + keys_BKTD.size(-2)
        self._keys_LBKSD[layer, :, :, self.length : end] = keys_BKTD
        self._values_LBKSD[layer, :, :, self.length : end] = values_BKTD
        return self._keys_LBKSD[layer, :, :, :end], self._values_LBKSD[layer, :, :, :end]


class LayerCache:
    """One layer's part of a cache; no dataclass, whose fields FSDP1 would take apart.

    Args:
        cache: The whole.
        index: Number of the layer.
    """

    def __init__(self, cache: KeyValueCache, index: int) -> None:
        self.cache = cache
        self.index = index

    @property
    def length(self) -> int:
        """Tokens stored before the present ones."""
        return self.cache.length

    def append(self, keys_BKTD: Tensor, values_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        return self.cache.append(self.index, keys_BKTD, values_BKTD)
