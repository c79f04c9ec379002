"""Patch tokens by a few small convolutions in place of one large one."""

import math

import torch
from torch import Tensor, nn


class ConvStem(nn.Module):
    """Tokens (b, n, dim) from images (b, c, h, w), one for each patch, row-major.

    One GELU(GN(3×3 convolution)) of stride 2 for each factor of two in the patch's sides (at least
    one, of stride 1 where there is none), the widths doubling up to dim; then a convolution whose
    kernel and stride are what is left of the patch (1×1 for a power of two), with bias; LayerNorm.
    GN is a group norm of one group. A token sees a little more than its own patch.

    Source: Xiao et al. 2021, arXiv 2106.14881, which norms by batch: a group norm needs no running
    statistics and is the same for any number of processes.
    """

    def __init__(
        self,
        channels: int,
        patch: tuple[int, int],
        dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        strides, rest = halvings(patch)
        layers: list[nn.Module] = []
        for i, stride in enumerate(strides):
            width = max(8, dim >> (len(strides) - 1 - i))
            layers += [
                nn.Conv2d(channels, width, 3, stride, 1, bias=False, device=device, dtype=dtype),
                nn.GroupNorm(1, width, device=device, dtype=dtype),
                nn.GELU(),
            ]
            channels = width
        self.layers = nn.Sequential(*layers)
        self.project = nn.Conv2d(channels, dim, rest, rest, device=device, dtype=dtype)
        self.norm_out = nn.LayerNorm(dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew: LeCun-normal, with gain √2 before a GELU; biases zero."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                gain = 1.0 if module is self.project else math.sqrt(2)
                nn.init.normal_(module.weight, std=gain / math.sqrt(module.weight[0].numel()))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.project(self.layers(images))
        return self.norm_out(x.flatten(2).transpose(1, 2))  # b c h w -> b (h w) c


def halvings(patch: tuple[int, int]) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """The strides of the 3×3 convolutions for a patch, and the sides left to the last one."""
    p, q = patch
    strides = []
    while p % 2 == 0 or q % 2 == 0:
        strides.append((2 - p % 2, 2 - q % 2))
        p, q = p // strides[-1][0], q // strides[-1][1]
    return strides or [(1, 1)], (p, q)
