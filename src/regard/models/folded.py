"""Pixel attention with its weights folded for good, as an exported file holds it."""

import copy

from torch import Tensor, nn

from regard.layers.pixel_attention import PixelAttention
from regard.layers.pixel_fold import Folded, attend_folded, fold
from regard.layers.pixel_params import PixelParams


class FoldedPixelAttention(nn.Module):
    """`PixelAttention` at inference; see `layers.pixel_fold`. It has no parameters to train."""

    weight: Tensor
    bias: Tensor
    out_weight: Tensor
    out_bias: Tensor

    def __init__(self, module: PixelAttention) -> None:
        super().__init__()
        self.num_groups, self.eps = module.num_groups, module.eps
        params = PixelParams(**module.params())
        folded = fold(params, module.num_heads)
        self.num_heads = folded.num_heads
        for name in ("weight", "bias", "out_weight", "out_bias"):
            value = getattr(folded, name).to(params.norm_weight.device, params.norm_weight.dtype)
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """x (b, c, h, w) to the same shape and dtype."""
        folded = Folded(self.num_heads, self.weight, self.bias, self.out_weight, self.out_bias)
        return attend_folded(x, folded, self.num_groups, self.eps)


def fold_pixel_attention(model: nn.Module) -> nn.Module:
    """A copy of `model` whose `PixelAttention` blocks are folded; `model` stays as it is."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is PixelAttention:
                setattr(module, name, FoldedPixelAttention(child))
    return model
