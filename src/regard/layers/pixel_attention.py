"""Group norm that keeps its accuracy on large offsets and nearly constant inputs."""

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from regard._device import autocasts, is_traced, may_overwrite, native_products, working_dtype
from regard.errors import InputError, nearest
from regard.layers.attend import attend
from regard.layers.checks import count, divisor


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


# The ten parameters of pixel attention, and what is refused of them and of the map.


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class PixelParams(NamedTuple):
    """The ten parameters: vectors (c,) and, named …_weight but the norm's, matrices (c, c)."""

    norm_weight: Tensor
    norm_bias: Tensor
    q_weight: Tensor
    q_bias: Tensor
    k_weight: Tensor
    k_bias: Tensor
    v_weight: Tensor
    v_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor


KEYS = PixelParams._fields
MATRICES = ("q_weight", "k_weight", "v_weight", "out_weight")


def as_tensor(value: Any, name: str) -> Tensor:
    """A tensor from a tensor, a NumPy array or nested lists of numbers."""
    if isinstance(value, Tensor):
        return value
    is_array = isinstance(value, (np.ndarray, np.generic))
    try:
        array = np.asarray(value)
        if array.dtype.kind not in ("f" if is_array and name == "x" else "fiu"):
            raise TypeError(f"its elements are {array.dtype}")
        native = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
        tensor = torch.from_numpy(native)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} is a {type(value).__name__} that makes no floating-point tensor ({error}); "
            "give a tensor, a NumPy array or nested lists of numbers"
        ) from None
    return tensor if is_array else tensor.to(torch.get_default_dtype())


def check_map(x: Tensor) -> Tensor:
    """Refuse an x that is no feature map."""
    if not isinstance(x, Tensor):
        raise InputError(f"x is a {type(x).__name__}; give a tensor (batch, channels, h, w)")
    if x.dtype not in DTYPES:
        raise InputError(
            f"x has dtype {x.dtype}; give float16, bfloat16, float32 or float64, e.g. x.float()"
        )
    if x.ndim != 4 or min(x.shape[1:]) < 1:
        raise InputError(
            f"x has shape {tuple(x.shape)}; give (batch, channels, height, width) with at least "
            "one channel, row and column"
        )
    return x


def check_eps(eps: Any) -> float:
    """Refuse an eps that is no finite number of at least zero."""
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < math.inf:
        raise InputError(f"eps={eps!r}: give a finite number of at least 0, such as 1e-5")
    return float(eps)


def check_keys(params: Mapping[str, Any]) -> None:
    """Refuse params whose keys are not exactly the ten."""
    try:
        given = set(params.keys())
    except AttributeError:
        raise InputError(
            f"params is a {type(params).__name__}; give a mapping with the keys {', '.join(KEYS)}"
        ) from None
    missing = [key for key in KEYS if key not in given]
    unknown = sorted(str(key) for key in given if key not in KEYS)
    if missing or unknown:
        said = [f"params lacks {', '.join(missing)}"] if missing else []
        said += [f"params has the unknown key {key!r} ({nearest(key, KEYS)})" for key in unknown]
        raise InputError(f"{'; '.join(said)}; give exactly {', '.join(KEYS)}")


def as_params(params: Mapping[str, Any], x: Tensor) -> PixelParams:
    """The ten parameters as tensors of x's dtype on x's device, or a refusal."""
    check_keys(params)
    channels = x.shape[1]
    checked = []
    for key in KEYS:
        value = params[key]
        tensor = as_tensor(value, key)
        shape = (channels, channels) if key in MATRICES else (channels,)
        if tuple(tensor.shape) != shape:
            raise InputError(
                f"{key} has shape {tuple(tensor.shape)}; for x with {channels} channels give "
                f"{shape}"
            )
        if tensor.is_complex() or tensor.dtype == torch.bool:
            raise InputError(f"{key} has dtype {tensor.dtype}; give real numbers")
        if isinstance(value, Tensor) and tensor.device != x.device:
            raise InputError(
                f"{key} is on device {tensor.device} and x on {x.device}; move one to the other"
            )
        checked.append(tensor.to(device=x.device, dtype=x.dtype))
    return PixelParams(*checked)


# The steps of pixel attention: map to tokens, projection, attention, projection onto the map.


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


# Pixel attention with its weights folded, for inference.
#
# With x̂ the normalised pixels before gain γ and bias β, and W′ = W diag(γ), b′ = W β + b:
#
# several heads   [Q, K, V] = x̂ [W_q′, W_k′, W_v′]ᵀ + [b_q′, 0, 0]: one product. The key's bias
#                 cancels in the softmax; the value's passes through it, weights summing to one.
# one head        scale · q_i·k_j = (x̂_i A + u)·x̂_j up to what does not depend on j, with
#                 A = scale W_q′ᵀ W_k′ and u = scale b_q′ W_k′; and W_o Σ_j p_ij v_j =
#                 M Σ_j p_ij x̂_j with M = W_o W_v′: keys and values are the normalised pixels, and
#                 two products with (c, c) matrices are left of four.
# both            the result is x + … + b_o + W_o b_v′.


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


# Self-attention across the pixels of a feature map: one function, and the module on it.


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


# Pixel attention with its weights folded for good, as an exported file holds it.


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
