"""The feed-forward layers of a block."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class SwiGLU(nn.Module):
    """W_2(silu(W x) * V x) (https://arxiv.org/abs/2002.05202).

    Args:
        n_embd: Width of the model.
        ffn_hidden: Hidden width of a two-matrix layer of the same size; see :func:`swiglu_hidden_width`.
        bias: Biases in the three projections.
        dropout: Probability, of outputs.
        multiple_of: The hidden width is rounded up to a multiple of it.
    """

    def __init__(self, n_embd: int, ffn_hidden: int, bias: bool, dropout: float, multiple_of: int) -> None:
        super().__init__()
        hidden_width = swiglu_hidden_width(ffn_hidden, multiple_of)
        self.W = nn.Linear(n_embd, hidden_width, bias=bias)
        self.V = nn.Linear(n_embd, hidden_width, bias=bias)
        self.W_2 = nn.Linear(hidden_width, n_embd, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., n_embd) to (..., n_embd)."""
        return self.dropout(self.W_2(functional.silu(self.W(inputs)) * self.V(inputs)))


class GELUFeedForward(nn.Module):
    """c_proj(gelu(c_fc x)).

    Args:
        n_embd: Width of the model.
        ffn_hidden: Hidden width.
        bias: Biases in both projections.
        dropout: Probability, of outputs.
    """

    def __init__(self, n_embd: int, ffn_hidden: int, bias: bool, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(n_embd, ffn_hidden, bias=bias)
        self.c_proj = nn.Linear(ffn_hidden, n_embd, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., n_embd) to (..., n_embd)."""
        return self.dropout(self.c_proj(functional.gelu(self.c_fc(inputs))))


def swiglu_hidden_width(ffn_hidden: int, multiple_of: int) -> int:
    """Two thirds of ``ffn_hidden``, so that three matrices count as many weights as two, rounded up."""
    two_thirds = 2 * ffn_hidden // 3
    return -(-two_thirds // multiple_of) * multiple_of
