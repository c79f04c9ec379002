"""Self-attention across the pixels of a feature map: one function, and the module on it."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.hardware import native_products, working_dtype
from regard.layers.checks import count, divisor
from regard.layers.pixel_fold import (
    FoldCache,
    attend_folded,
    join,
    joining_pays,
    may_fold,
    pack,
)
from regard.layers.pixel_params import (
    KEYS,
    MATRICES,
    PixelParams,
    as_params,
    as_tensor,
    check_eps,
    check_keys,
    check_map,
)


def pixel_attention(
    x: Any, params: Mapping[str, Any], num_groups: int, num_heads: int, *, eps: float = 1e-5
) -> Tensor:
    """Multi-head self-attention across the pixels of x, added to x.

    Z = tokens(GN(x));  Q = Z W_qᵀ + b_q,  K = Z W_kᵀ + b_k,  V = Z W_vᵀ + b_v;
    O_j = softmax(Q_j K_jᵀ / √d) V_j over the keys, for each head j = 1 … num_heads;
    result = x + image([O_1, …] W_oᵀ + b_o).

    `tokens` turns (b, c, h, w) into (b, h·w, c), pixel (i, j) at row i·w + j; `image` undoes it.
    GN is a group norm with `num_groups` groups. Head j holds the channels j·d to (j+1)·d - 1,
    d = c / num_heads. No h·w × h·w matrix is kept (see `attend`).

    Args:
        x: feature map (b, c, h, w), float16, bfloat16, float32 or float64; a tensor, a NumPy array
            or nested lists, which become the default dtype. b may be 0.
        params: the ten `KEYS`: norm_weight, norm_bias, q_bias, k_bias, v_bias, out_bias (c,) and
            q_weight, k_weight, v_weight, out_weight (c, c), used as in a linear layer; tensors on
            x's device, arrays or lists; cast to x's dtype.
        num_groups: groups of the norm, a divisor of c.
        num_heads: heads of the attention, a divisor of c.
        eps: added to the variance.

    Returns:
        A tensor (b, c, h, w) with x's dtype and device. Gradients flow to x and every parameter.

    Raises:
        InputError: naming the argument, what came and what was needed.

    Source: the non-local block of Wang et al. 2018 (arXiv 1711.07971) in the form that diffusion
    models use it, Ho et al. 2020 (arXiv 2006.11239).
    """
    x = check_map(as_tensor(x, "x"))
    channels = x.shape[1]
    num_groups = divisor(num_groups, "num_groups", channels, "channels")
    num_heads = divisor(num_heads, "num_heads", channels, "channels")
    return attend_pixels(x, as_params(params, x), num_groups, num_heads, check_eps(eps))


def attend_pixels(
    x: Tensor, params: PixelParams, num_groups: int, num_heads: int, eps: float
) -> Tensor:
    """`pixel_attention` on checked arguments.

    b_k adds the same number to every score of a row, which the softmax takes away again: it is
    left out, and its gradient is zero, where rounding noise would be in its place.
    """
    with native_products(x.device.type):
        p = PixelParams(*(value.to(working_dtype(x)) for value in params))
        folded = join(p) if joining_pays(x, num_heads) else pack(p, num_heads)
        no_gradient = torch.sign(p.k_bias) * 0
        folded = folded._replace(out_bias=folded.out_bias + no_gradient)
        return attend_folded(x, folded, num_groups, eps, p.norm_weight, p.norm_bias)


class PixelAttention(nn.Module):
    """`pixel_attention` as a module that owns its ten parameters.

    At inference (eval mode, gradients off) the norm's gain and the biases are folded into the
    projections, with one head the projections into each other: see `pixel_fold`. The folded
    weights are made once, stand outside the state dict and follow every change of the weights.

    Starts as the identity: out_weight and out_bias are zero; q, k and v weights are normal with
    standard deviation channels^-½, their biases zero, the norm's gain one and bias zero.

    Args:
        channels: channels c of the map.
        num_heads: a divisor of c.
        num_groups: groups of the norm, a divisor of c.
        eps: added to the variance of the norm (many VAEs were trained with 1e-6).
    """

    def __init__(
        self,
        channels: int,
        num_heads: int = 1,
        num_groups: int = 32,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels = count(channels, "channels")
        self.num_heads = divisor(num_heads, "num_heads", channels, "channels")
        self.num_groups = divisor(num_groups, "num_groups", channels, "channels")
        self.eps = check_eps(eps)
        for key in KEYS:
            shape = (channels, channels) if key in MATRICES else (channels,)
            setattr(self, key, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self._fold = FoldCache()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, as the class says."""
        for key, value in self.named_parameters():
            if key == "norm_weight":
                nn.init.ones_(value)
            elif key in ("q_weight", "k_weight", "v_weight"):
                nn.init.normal_(value, std=1 / math.sqrt(self.channels))
            else:
                nn.init.zeros_(value)

    @classmethod
    def from_params(
        cls, params: Mapping[str, Any], num_groups: int, num_heads: int, *, eps: float = 1e-5
    ) -> "PixelAttention":
        """A module holding a copy of `params`, which are as `pixel_attention` takes them.

        dtype and device are those of norm_weight; the other parameters follow.
        """
        check_keys(params)
        first = as_tensor(params["norm_weight"], "norm_weight")
        if first.ndim != 1:
            raise InputError(f"norm_weight has shape {tuple(first.shape)}; give (channels,)")
        like = first.new_empty(1, first.shape[0], 1, 1)
        checked = as_params(params, check_map(like))
        module = cls(
            like.shape[1], num_heads, num_groups, eps, device=first.device, dtype=first.dtype
        )
        with torch.no_grad():
            for key, value in checked._asdict().items():
                getattr(module, key).copy_(value)
        return module

    def params(self) -> dict[str, Tensor]:
        """The module's own parameters under the ten `KEYS`, not copies."""
        return {key: getattr(self, key) for key in KEYS}

    def forward(self, x: Tensor) -> Tensor:
        """x (b, channels, h, w) to the same shape and dtype."""
        check_map(x)
        if x.shape[1] != self.channels:
            raise InputError(
                f"x has shape {tuple(x.shape)}, {x.shape[1]} channels; this block has "
                f"{self.channels}"
            )
        params = PixelParams(*(getattr(self, key) for key in KEYS))
        if self.training or not may_fold(x):
            params = PixelParams(*(value.to(x.dtype) for value in params))
            return attend_pixels(x, params, self.num_groups, self.num_heads, self.eps)
        return attend_folded(
            x, self._fold.get(params, x, self.num_heads), self.num_groups, self.eps
        )

    def train(self, mode: bool = True) -> "PixelAttention":
        self._fold.clear()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> "PixelAttention":
        self._fold.clear()
        return super()._apply(*args, **kwargs)

    def extra_repr(self) -> str:
        return (
            f"{self.channels}, num_heads={self.num_heads}, num_groups={self.num_groups}, "
            f"eps={self.eps}"
        )
