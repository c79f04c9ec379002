"""The ten parameters of pixel attention, and what is refused of them and of the map."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.errors import InputError, nearest

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
