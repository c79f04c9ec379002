"""Patch tokens by a few small convolutions in place of one large one."""

import torch
from torch import Tensor, nn

from regard.layers.conv import ConvStage
from regard.layers.whitening import WhiteningStem

DEPTH = 2  # convolutions of a stage
POOLED = 2  # the last factors of two of a patch that are pooled; whitening takes the earlier ones


class ConvStem(nn.Module):
    """Tokens (b, n, dim) from images (b, c, h, w), one for each patch, row-major.

    x = WhiteningStem(images, their last rows and columns repeated);  ConvStage for each of the last
    two factors of two in the patch's sides, which it pools, or one that pools nothing where there
    is none, the widths dim / 4 and dim;  a convolution whose kernel and stride are what is left
    of the patch (1×1 for a power of two), with bias;  LayerNorm. The stride of the whitening is the
    patch's earlier factors of two: 1 for a patch of 4, 4 for one of 16. A token sees more than its
    own patch.

    Source: a stem of convolutions is Xiao et al. 2021, arXiv 2106.14881; whitened and pooled ones
    are from airbench94 (Jordan 2024, arXiv 2404.00498).
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
        stride, pools, rest = halvings(patch)
        self.whitening = WhiteningStem(channels, stride, device=device, dtype=dtype)
        inputs = 2 * self.whitening.components
        self.stages = nn.ModuleList()
        for i, pool in enumerate(pools):
            width = max(8, dim >> 2 * (len(pools) - 1 - i))
            self.stages.append(ConvStage(inputs, width, DEPTH, pool, device=device, dtype=dtype))
            inputs = width
        self.project = nn.Conv2d(inputs, dim, rest, rest, device=device, dtype=dtype)
        self.norm_out = nn.LayerNorm(dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew: the projection LeCun-normal with zero bias."""
        for module in (self.whitening, *self.stages):
            module.reset_parameters()
        nn.init.normal_(self.project.weight, std=self.project.weight[0].numel() ** -0.5)
        assert self.project.bias is not None
        nn.init.zeros_(self.project.bias)

    def forward(self, images: Tensor) -> Tensor:
        down, right = self.whitening.stride
        x = nn.functional.pad(images, (0, right, 0, down), mode="replicate")
        x = self.whitening(x.contiguous(memory_format=torch.channels_last))
        for stage in self.stages:
            x = stage(x)
        x = self.project(x)
        return self.norm_out(x.flatten(2).transpose(1, 2))  # b c h w -> b (h w) c


Sides = tuple[int, int]


def halvings(patch: Sides) -> tuple[Sides, list[Sides], Sides]:
    """A patch's sides as a product: the whitening's stride, the stages' pools, and the rest."""
    p, q = patch
    factors = []
    while p % 2 == 0 or q % 2 == 0:
        factors.append((2 - p % 2, 2 - q % 2))
        p, q = p // factors[-1][0], q // factors[-1][1]
    h = w = 1
    for down, right in factors[:-POOLED]:
        h, w = h * down, w * right
    return (h, w), factors[-POOLED:] or [(1, 1)], (p, q)
