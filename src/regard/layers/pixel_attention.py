"""Self-attention across the pixels of a feature map: one function, and the module on it."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.errors import InputError, nearest
from regard.layers.attend import attend
from regard.layers.checks import count, divisor
from regard.layers.group_norm import group_norm

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
    """`pixel_attention` on checked arguments."""
    b, c, h, w = x.shape
    z = group_norm(x, num_groups, params.norm_weight, params.norm_bias, eps)
    z = z.flatten(2).transpose(1, 2)  # b c h w -> b (h w) c

    def heads(weight: Tensor, bias: Tensor) -> Tensor:
        tokens = nn.functional.linear(z, weight, bias)
        return tokens.unflatten(2, (num_heads, -1)).transpose(1, 2)  # b n (g d) -> b g n d

    mixed = attend(
        heads(params.q_weight, params.q_bias),
        heads(params.k_weight, params.k_bias),
        heads(params.v_weight, params.v_bias),
        scale=1 / math.sqrt(c // num_heads),
    )
    mixed = mixed.transpose(1, 2).flatten(2)  # b g n d -> b n (g d)
    out = nn.functional.linear(mixed, params.out_weight, params.out_bias)
    return x + out.transpose(1, 2).reshape(b, c, h, w).to(x.dtype)


class PixelAttention(nn.Module):
    """`pixel_attention` as a module that owns its ten parameters.

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
        params = PixelParams(*(getattr(self, key).to(x.dtype) for key in KEYS))
        return attend_pixels(x, params, self.num_groups, self.num_heads, self.eps)

    def extra_repr(self) -> str:
        return (
            f"{self.channels}, num_heads={self.num_heads}, num_groups={self.num_groups}, "
            f"eps={self.eps}"
        )


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
