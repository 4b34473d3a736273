"""Transforms of queries, keys and values before attention.

Shape suffixes: B batch, H heads, T sequence, D width of a head, R = D / 2 rotation planes.
"""

# shape suffixes are capitals
# ruff: noqa: N803, N806

from __future__ import annotations

import torch
from torch import Tensor, nn

from modalities.models.settings import IdentityTransformWrapper, RotaryTransformWrapper


class IdentityTransform(nn.Module):
    """Leaves queries, keys and values as they are."""

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        return queries, keys, values


class RotaryTransform(nn.Module):
    """Rotary position embedding (https://arxiv.org/abs/2104.09864): plane r turns by position / base^(r / R).

    Plane r is spanned by the components r and r + R of a head: the halves are rotated into each other.

    Args:
        n_embd: Width of the model.
        n_head: Number of query heads.
        base_freq: The base.
    """

    inv_freq: Tensor

    def __init__(self, n_embd: int, n_head: int, base_freq: int) -> None:
        super().__init__()
        self.head_width = n_embd // n_head
        self.base_freq = base_freq
        self.register_buffer("inv_freq", self.frequencies(None), persistent=True)

    def reset_parameters(self) -> None:
        """Compute the buffer anew, after ``to_empty``."""
        self.inv_freq.copy_(self.frequencies(self.inv_freq.device))

    def forward(
        self, queries_BHTD: Tensor, keys_BHTD: Tensor, values_BHTD: Tensor, start: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Turn queries and keys; their first position is ``start``."""
        device, length = queries_BHTD.device, queries_BHTD.size(-2)
        # mixed precision may have rounded the buffer, and rounded frequencies misplace far positions
        inv_freq_R = self.inv_freq if self.inv_freq.dtype == torch.float32 else self.frequencies(device)
        positions_T = torch.arange(start, start + length, device=device, dtype=torch.float32)
        angles_TR = positions_T[:, None] * inv_freq_R[None, :]
        cosines_TR, sines_TR = angles_TR.cos().type_as(queries_BHTD), angles_TR.sin().type_as(queries_BHTD)
        return rotate(queries_BHTD, cosines_TR, sines_TR), rotate(keys_BHTD, cosines_TR, sines_TR), values_BHTD

    def frequencies(self, device: torch.device | None) -> Tensor:
        """The angle of each plane per position, (R,) in fp32."""
        exponents_R = torch.arange(0, self.head_width, 2, dtype=torch.float32, device=device) / self.head_width
        return 1.0 / (self.base_freq**exponents_R)


def rotate(inputs_BHTD: Tensor, cosines_TR: Tensor, sines_TR: Tensor) -> Tensor:
    """Rotate the first half of each head into the second."""
    first_BHTR, second_BHTR = inputs_BHTD.chunk(2, dim=-1)
    return torch.cat(
        (first_BHTR * cosines_TR - second_BHTR * sines_TR, second_BHTR * cosines_TR + first_BHTR * sines_TR), dim=-1
    )


def make_transform(wrapper: RotaryTransformWrapper | IdentityTransformWrapper) -> nn.Module:
    """The transform that a ``QueryKeyValueTransformConfig`` describes."""
    if isinstance(wrapper, IdentityTransformWrapper):
        return IdentityTransform()
    return RotaryTransform(wrapper.config.n_embd, wrapper.config.n_head, wrapper.config.base_freq)


@torch.no_grad()
def follow_configured_bases_(model: nn.Module) -> list[int]:
    """Give rotary embeddings the frequencies of their own base again, where a checkpoint has put those of another.

    Frequencies that differ in rounding only stay as they were loaded.

    Returns:
        The bases for which that was so.
    """
    followed = []
    for module in model.modules():
        if isinstance(module, RotaryTransform) and module.inv_freq.dtype == torch.float32:
            own = module.frequencies(module.inv_freq.device)
            if not torch.allclose(module.inv_freq, own, rtol=1e-4, atol=0):
                module.inv_freq.copy_(own)
                followed.append(module.base_freq)
    return followed
