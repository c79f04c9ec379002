"""Pixel attention with its weights folded, for inference.

With x̂ the normalised pixels before gain γ and bias β, and W′ = W diag(γ), b′ = W β + b:

several heads   [Q, K, V] = x̂ [W_q′, W_k′, W_v′]ᵀ + [b_q′, 0, 0]: one product. The key's bias
                cancels in the softmax; the value's passes through it, weights summing to one.
one head        scale · q_i·k_j = (x̂_i A + u)·x̂_j up to what does not depend on j, with
                A = scale W_q′ᵀ W_k′ and u = scale b_q′ W_k′; and W_o Σ_j p_ij v_j =
                M Σ_j p_ij x̂_j with M = W_o W_v′: keys and values are the normalised pixels, and
                two products with (c, c) matrices are left of four.
both            the result is x + … + b_o + W_o b_v′.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.hardware import autocasts, is_traced, native_products, working_dtype
from regard.layers.attend import attend
from regard.layers.pixel_params import PixelParams
from regard.layers.pixel_steps import add_projected, attend_packed, normed_tokens, project


class Folded(NamedTuple):
    """Weights (k, c) and (k,) of the first product, k = c with one head and 3c with more."""

    num_heads: int
    weight: Tensor
    bias: Tensor
    out_weight: Tensor
    out_bias: Tensor


@torch.no_grad()
def fold(params: PixelParams, num_heads: int) -> Folded:
    """The folded weights in float64 on the CPU; `params` are not changed."""
    p = PixelParams(*(value.detach().to("cpu", torch.float64) for value in params))
    p = p._replace(
        q_weight=p.q_weight * p.norm_weight,
        k_weight=p.k_weight * p.norm_weight,
        v_weight=p.v_weight * p.norm_weight,
        q_bias=p.q_bias + p.q_weight @ p.norm_bias,
        v_bias=p.v_bias + p.v_weight @ p.norm_bias,
    )
    return join(p) if num_heads == 1 else pack(p, num_heads)


def join(p: PixelParams) -> Folded:
    """One head's weights in two products, differentiably; the norm is left as it is."""
    scale = 1 / math.sqrt(len(p.q_bias))
    return Folded(
        1,
        weight=scale * p.k_weight.t() @ p.q_weight,
        bias=scale * p.q_bias @ p.k_weight,
        out_weight=p.out_weight @ p.v_weight,
        out_bias=p.out_bias + p.out_weight @ p.v_bias,
    )


def pack(p: PixelParams, num_heads: int) -> Folded:
    """The first three products in one, differentiably; the norm is left as it is."""
    zero = torch.zeros_like(p.q_bias)
    return Folded(
        num_heads,
        weight=torch.cat((p.q_weight, p.k_weight, p.v_weight)),
        bias=torch.cat((p.q_bias, zero, zero)),
        out_weight=p.out_weight,
        out_bias=p.out_bias + p.out_weight @ p.v_bias,
    )


def attend_folded(
    x: Tensor,
    folded: Folded,
    num_groups: int,
    eps: float,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
) -> Tensor:
    """Pixel attention of x (b, c, h, w) with folded weights in the dtype to compute in.

    `norm_weight` and `norm_bias` are given where the norm's are not folded.
    """
    num_heads, weight, bias, out_weight, out_bias = folded
    with native_products(x.device.type):
        pixels = normed_tokens(x, num_groups, norm_weight, norm_bias, eps)
        if len(weight) > x.shape[1]:
            mixed = attend_packed(project(pixels, weight, bias), num_heads)
        else:
            pixels = pixels.contiguous()
            queries = project(pixels, weight, bias)
            mixed = attend(queries[:, None], pixels[:, None], pixels[:, None], scale=1.0)[:, 0]
        return add_projected(x, mixed, out_weight, out_bias)


def joining_pays(x: Tensor, num_heads: int) -> bool:
    """Whether weights joined for this one call save more products than joining them costs.

    In half precision the joined weights would be rounded once more.
    """
    if num_heads > 1 or working_dtype(x).itemsize < 4 or torch.compiler.is_exporting():
        return False
    b, c, h, w = x.shape
    return b * h * w > c and not autocasts(x.device.type)


def may_fold(x: Tensor) -> bool:
    """Whether folded weights may be used: nothing differentiates, traces or transforms."""
    if is_traced():
        return False
    if x.is_meta:  # there are no numbers to fold
        return False
    return not torch.is_grad_enabled()


class FoldCache:
    """The folded weights of one module, made again whenever a weight has changed.

    A change is seen by the weight's memory, version and dtype; and since writing through `.data`
    or NumPy changes none of them, on the CPU by comparing with a copy of the weights' bits.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._key: Any = None
        self._bits: list[Tensor] = []
        self._folded: Folded | None = None

    def get(self, params: PixelParams, x: Tensor, num_heads: int) -> Folded:
        """The folded weights for x, those of last time where nothing changed since."""
        key = (working_dtype(x), x.dtype, x.device, tuple(map(identity, params)))
        if self._folded is None or key != self._key or not self._same_bits(params):
            # The contract casts parameters to x's dtype before anything is computed.
            made = fold(PixelParams(*(value.to(x.dtype) for value in params)), num_heads)
            ready = (value.to(x.device, working_dtype(x)) for value in made[1:])
            self._folded, self._key = Folded(num_heads, *ready), key
            self._bits = [bits(value).clone() for value in params if value.device.type == "cpu"]
        return self._folded

    def _same_bits(self, params: PixelParams) -> bool:
        now = (bits(value) for value in params if value.device.type == "cpu")
        return all(torch.equal(a, b) for a, b in zip(now, self._bits, strict=True))

    def __deepcopy__(self, memo: Any) -> "FoldCache":
        return FoldCache()

    def __reduce__(self) -> Any:
        return (FoldCache, ())


def identity(value: Tensor) -> tuple[Any, ...]:
    """What tells a tensor from another, or from itself before a change that torch saw."""
    version = None if value.is_inference() else value._version
    return value.data_ptr(), version, value.dtype, value.device


def bits(value: Tensor) -> Tensor:
    """The tensor's memory as integers, in which NaN equals itself."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return value.detach().contiguous().view(kinds[value.dtype.itemsize])
