"""Group norm that keeps its accuracy on large offsets and nearly constant inputs."""

import torch
from torch import Tensor


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """(x - mean) / √(var + eps) · weight + bias, over each group of channels of x (b, c, h, w).

    Statistics are taken in float32 or wider; the result has x's dtype and memory format. The mean
    is subtracted before torch's norm, which subtracts the mean of what is left: one subtraction
    leaves the rounding of the mean, which at an offset of 1000 is as large as a small signal. The
    norm does not change when a number is added to a group, so no gradient flows through the mean.
    Unlike `torch.nn.functional.group_norm` a single value per group is allowed; it gives `bias`.
    """
    b, c = x.shape[:2]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    with torch.no_grad():
        mean = wide.mean(dim=(2, 3)).view(b, num_groups, c // num_groups).mean(dim=2)
        mean = mean.repeat_interleave(c // num_groups, dim=1)
    weight = None if weight is None else weight.to(wide.dtype)
    bias = None if bias is None else bias.to(wide.dtype)
    centred = wide - mean[:, :, None, None]
    return torch.group_norm(centred, num_groups, weight, bias, eps).to(x.dtype)
