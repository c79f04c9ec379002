"""Exact softmax attention: one function that everything else calls."""

import math

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    score_dtype: torch.dtype = torch.float32,
    kernel: str = "auto",
) -> Tensor:
    """softmax(scale · q kᵀ) v over the last two dimensions.

    q (…, n, d), k (…, m, d), v (…, m, e); leading dimensions broadcast; returns (…, n, e).
    `scale` defaults to 1/√d.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
