"""Exact softmax attention: one function that everything else calls."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard import hardware
from regard.layers.attend_choice import Choice, Problem, block_bytes
from regard.layers.attend_function import (
    EagerKernelAttention,
    KernelAttention,
    NativeAttention,
    native,
)
from regard.layers.attend_kernels import plain
from regard.layers.attend_plan import checked_scale, plan
from regard.layers.observe import observers

# Told of every choice while `explain` listens.
listeners: list[Callable[[Problem, Choice], None]] = []


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    score_dtype: torch.dtype = torch.float32,
    kernel: str = "auto",
) -> Tensor:
    """softmax(scale · q kᵀ) v over the last two dimensions, exactly.

    out_it = Σ_j softmax_j(scale Σ_s q_is k_js) v_jt, for each of the leading dimensions.

    Args:
        q: queries (…, n, d), float16, bfloat16, float32 or float64; n may be 0.
        k: keys (…, m, d) of q's dtype, on its device; m at least 1, since a softmax over no
            keys is undefined.
        v: values (…, m, e), likewise. Leading dimensions broadcast.
        scale: the factor on q·k, 1/√d unless given.
        score_dtype: scores are held in the wider of this and q's dtype. float32, the default,
            gives half-precision inputs the accuracy of torch's fused attention at any size of
            logits. q's own dtype allows scores to be rounded to it, which is faster where the
            hardware multiplies half precision, and right only where logits are bounded (errors
            grow with them); where it is not faster, scores stay in float32.
        kernel: "plain" (all scores at once), "sdpa" (torch's fused attention), "blocked" (blocks
            of queries, recomputed in backward) or "auto", which `explain` explains.
            `attention_kernel` forces one, and another score_dtype, from outside.

    Returns:
        (…, n, e) with the inputs' dtype. Under autocast the operands, float64 excepted, are
        first cast to its dtype. Beyond n·(d + e) and m·(d + e) numbers a head, memory is bounded
        by a constant in either pass, unless `kernel="plain"` is forced. Gradients of gradients
        take the plain form. The same inputs give the same bits on the same machine and number of
        threads on CPU.

    Raises:
        InputError: naming the argument, what came and what was needed.

    Source: Vaswani et al. 2017, arXiv 1706.03762; blocks and the recomputation from the sum of
    exponentials as in Dao et al. 2022, arXiv 2205.14135.
    """
    if torch.compiler.is_exporting():
        # The file must not need us, and n must stay free: no rule on shapes.
        return scaled_dot_product_attention(*autocast(q, k, v), scale=scale)
    if scale is not None:
        scale = checked_scale(scale)
    if observers:
        options = {"scale": scale, "score_dtype": score_dtype, "kernel": kernel}
        return observers[-1](q, k, v, options)
    if isinstance(q, Tensor) and hardware.autocasts(q.device.type):
        operands = autocast(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            return attend(*operands, scale=scale, score_dtype=score_dtype, kernel=kernel)
    problem, choice, leading, direct = plan(q, k, v, score_dtype, kernel)
    for listen in listeners:
        listen(problem, choice)
    if direct and in_rows(q, k, v) and not torch._C._are_functorch_transforms_active():
        return scaled_dot_product_attention(q, k, v, scale=scale)
    if leading is not None:
        q, k, v = (four_dimensions(x, leading) for x in (q, k, v))
    scale = 1 / math.sqrt(problem.d) if scale is None else scale
    out = run(choice.kernel, q, k, v, scale, problem)
    return out if leading is None else out.reshape(*leading, *out.shape[2:])


def run(kernel: str, q: Tensor, k: Tensor, v: Tensor, scale: float, problem: Problem) -> Tensor:
    """One kernel on operands of four dimensions."""
    if kernel == "plain":
        return plain(q, k, v, scale, problem.rounded)
    compiling = torch.compiler.is_compiling()
    transformed = compiling or torch._C._are_functorch_transforms_active()
    if kernel == "sdpa" and problem.device != "cpu":
        if problem.grad and not transformed:
            return NativeAttention.apply(q, k, v, scale)
        return native(q, k, v, scale)
    if problem.device == "mps":
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    rest = scale, kernel, problem.rounded, block_bytes(problem.device), problem.grad
    if transformed:
        return KernelAttention.apply(q, k, v, *rest)[0]
    if problem.grad:
        return EagerKernelAttention.apply(q, k, v, *rest)
    return KernelAttention.forward(q, k, v, *rest)[0]


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The operands in autocast's dtype where it is on, as torch's attention takes them."""
    device = q.device.type
    if not hardware.autocasts(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    cast = [x.to(dtype) if castable(x) else x for x in (q, k, v)]
    return cast[0], cast[1], cast[2]


def castable(x: Tensor) -> bool:
    """Whether autocast casts this; what is no floating-point tensor is refused later."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64


def in_rows(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the rows of operands of one width are contiguous and do not overlap."""
    width = q.shape[-1]
    return (
        q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        and q.stride(-2) >= width <= k.stride(-2)
        and v.stride(-2) >= width
    )


def four_dimensions(x: Tensor, leading: torch.Size) -> Tensor:
    """x expanded to `leading`, and that made two dimensions."""
    if x.shape[:-2] != leading:
        x = x.expand(*leading, *x.shape[-2:])
    if len(leading) < 2:
        return x[(None,) * (2 - len(leading))]
    return x if len(leading) == 2 else x.flatten(0, -4)
