"""What one call of `attend` will do, worked out once for operands of the same kind.

Beside products that have emptied the caches, each line of Python costs microseconds: a plan is
kept, and a later call with the same shapes, dtypes and devices looks it up.
"""

import functools
import math
import numbers
import sys
from fractions import Fraction
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard import hardware
from regard.errors import InputError
from regard.layers.attend_choice import (
    FLOATS,
    Choice,
    Problem,
    check_kernel,
    check_score_dtype,
    choose,
    settings,
)

LARGEST = sys.float_info.max


class Kind(NamedTuple):
    """What a plan needs of an operand."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Plan(NamedTuple):
    """A kernel for a problem.

    `leading` is what operands must first be broadcast to, if to any. `direct`: torch's attention
    takes operands as they are, if their rows are in order.
    """

    problem: Problem
    choice: Choice
    leading: torch.Size | None
    direct: bool


def plan(q: Tensor, k: Tensor, v: Tensor, score_dtype: torch.dtype, kernel: str) -> Plan:
    """The plan for operands that no autocast will cast, or a refusal."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise InputError(f"{name} is a {type(x).__name__}; give a tensor (…, tokens, width)")
        if x.layout != torch.strided:
            raise InputError(f"{name} has layout {x.layout}; give a dense tensor")
    if not (isinstance(kernel, str) and isinstance(score_dtype, torch.dtype)):
        check_kernel(kernel)
        check_score_dtype(score_dtype)
    # A compiler traces through the making, where shapes may be symbols.
    make = _make if torch.compiler.is_compiling() else _kept
    return make(
        *(q.shape, q.dtype, q.device, k.shape, k.dtype, k.device, v.shape, v.dtype, v.device),
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        score_dtype,
        kernel,
        settings(),
        hardware.BF16_PRODUCTS,
    )


def _make(*key: Any) -> Plan:
    q, k, v = Kind(*key[:3]), Kind(*key[3:6]), Kind(*key[6:9])
    grad, score_dtype, kernel, forced, bf16_products = key[9:]
    check_kinds(q, k, v)
    check_score_dtype(score_dtype)
    check_kernel(kernel)
    leading = leading_shape(q.shape, k.shape, v.shape)
    heads = 1
    for size in leading:
        heads *= size
    problem = Problem(
        device=q.device.type,
        dtype=q.dtype,
        heads=heads,
        n=q.shape[-2],
        m=k.shape[-2],
        d=q.shape[-1],
        e=v.shape[-1],
        grad=grad,
        rounded=torch.promote_types(q.dtype, forced.score_dtype or score_dtype).itemsize < 4,
        bf16_products=bf16_products,
    )
    choice = choose(problem, kernel, forced)
    alike = q.shape[:-2] == k.shape[:-2] == v.shape[:-2] and len(leading) == 2
    direct = choice.kernel == "sdpa" and problem.device == "cpu" and not grad
    direct = direct and alike and problem.d == problem.e and q.dtype != torch.float16
    return Plan(problem, choice, None if alike else leading, direct)


_kept = functools.lru_cache(maxsize=4096)(_make)


def checked_scale(scale: Any) -> float:
    """`scale` as a finite number; a tensor, which would lose its gradient, is none."""
    if isinstance(scale, torch.SymFloat) or torch.compiler.is_compiling():
        return cast(float, scale)  # a guard on it would break the graph
    real = isinstance(scale, (int, float, numbers.Real)) and not isinstance(scale, bool)
    whole = isinstance(scale, (int, Fraction))  # of any size
    if not real or (whole and not -LARGEST <= scale <= LARGEST) or not math.isfinite(scale):
        raise InputError(f"scale={scale!r}: give a finite number, or None for 1/√d")
    return float(scale)


def check_kinds(q: Kind, k: Kind, v: Kind) -> None:
    """Refuse shapes, devices and dtypes that make no attention."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) < 2:
            raise InputError(f"{name} is shape {tuple(x.shape)}; give a tensor (…, tokens, width)")
        if x.device != q.device:
            raise InputError(f"{name} is on {x.device} and q on {q.device}; move one to the other")
    if q.shape[-1] != k.shape[-1] or q.shape[-1] == 0:
        raise InputError(
            f"q has width {q.shape[-1]} and k width {k.shape[-1]}; give the same, at least 1"
        )
    if k.shape[-2] != v.shape[-2] or k.shape[-2] == 0:
        raise InputError(
            f"k has {k.shape[-2]} tokens and v {v.shape[-2]}; give the same number, at least 1"
        )
    if q.dtype not in FLOATS or not q.dtype == k.dtype == v.dtype:
        raise InputError(
            f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; give one of float16, "
            "bfloat16, float32 and float64, or run floating-point tensors under autocast"
        )


def leading_shape(q: torch.Size, k: torch.Size, v: torch.Size) -> torch.Size:
    """The common shape before the last two dimensions, or a refusal."""
    if q[:-2] == k[:-2] == v[:-2]:
        return q[:-2]
    try:
        return torch.broadcast_shapes(q[:-2], k[:-2], v[:-2])
    except RuntimeError:
        raise InputError(
            f"the leading dimensions of q {tuple(q)}, k {tuple(k)} and v {tuple(v)} do not "
            "broadcast; before the last two, give equal sizes or 1"
        ) from None
