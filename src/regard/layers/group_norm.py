"""Group norm that keeps its accuracy on large offsets and nearly constant inputs."""

import torch
from torch import Tensor


def group_norm(x: Tensor, num_groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / √(var + eps) · weight + bias, over each group of channels of x (b, c, h, w).

    Statistics are taken in float32 or wider; the result has x's dtype. The mean of the centred
    values is subtracted once more: one subtraction leaves the rounding of the mean, which at an
    offset of 1000 is as large as a small signal (see `docs/benchmarks.md`). Unlike
    `torch.nn.functional.group_norm` a single value per group is allowed; it gives `bias`.
    """
    b, c, h, w = x.shape
    groups = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(b, num_groups, c // num_groups * h * w)
    centred = groups - groups.mean(dim=2, keepdim=True)
    centred = centred - centred.mean(dim=2, keepdim=True)
    variance = centred.square().mean(dim=2, keepdim=True)
    normed = (centred * torch.rsqrt(variance + eps)).reshape(b, c, h, w)
    scaled = normed * weight[:, None, None] + bias[:, None, None]
    return scaled.to(x.dtype)
