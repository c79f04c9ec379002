"""The steps of pixel attention: map to tokens, projection, attention, projection onto the map."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from regard.hardware import may_overwrite, working_dtype
from regard.layers.attend import attend
from regard.layers.group_norm import group_norm


def normed_tokens(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Group norm of x as tokens (b, n, c), in the dtype to compute in; a view of the map."""
    z = group_norm(x.to(working_dtype(x)), num_groups, weight, bias, eps)
    return z.flatten(2).transpose(1, 2)  # b c h w -> b (h w) c


def project(tokens: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """tokens weightᵀ + bias, row-contiguous."""
    if tokens.is_contiguous() or not may_overwrite(tokens, weight, bias):
        return linear(tokens.contiguous(), weight, bias)
    # The product reads the transposed map as it is, where linear would copy it.
    return torch.baddbmm(bias, tokens, weight.t().expand(len(tokens), -1, -1))


def attend_packed(packed: Tensor, num_heads: int) -> Tensor:
    """Attention of packed queries, keys and values (b, n, 3c), each of c = heads × width."""
    b, n, triple = packed.shape
    # b n (3 g d) -> 3 of b g n d; unbound where they lie, their gradients are joined in one copy
    parts = packed.view(b, n, 3, num_heads, triple // 3 // num_heads).unbind(2)
    q, k, v = (part.transpose(1, 2) for part in parts)
    return attend(q, k, v).transpose(1, 2).flatten(2)  # b g n d -> b n (g d)


def add_projected(x: Tensor, mixed: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (b, c, h, w) + image(mixed weightᵀ + bias), in x's dtype and memory format."""
    b, c, h, w = x.shape
    if not may_overwrite(x, mixed, weight, bias):
        out = linear(mixed, weight, bias).transpose(1, 2).reshape(b, c, h, w)
        return (x + out).to(x.dtype)
    # The product is added to x + bias where that lies: the residual costs no pass of its own.
    out = x.to(mixed.dtype) + bias[:, None, None]
    tokens = out.permute(0, 2, 3, 1)
    if out.is_contiguous():
        out.view(b, c, h * w).baddbmm_(weight.expand(b, -1, -1), mixed.transpose(1, 2))
    elif tokens.is_contiguous():
        tokens.view(b, h * w, c).baddbmm_(mixed, weight.t().expand(b, -1, -1))
    else:
        out += linear(mixed, weight).transpose(1, 2).reshape(b, c, h, w)
    return out.to(x.dtype)
