"""Kernels as differentiable operations: under autograd, torch.func and torch.compile.

`attend` brings its operands to four dimensions (b, g, n, d) before it comes here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard.layers.attend_kernels import (
    blocked_backward,
    blocked_forward,
    plain_backward,
    precision,
)

# CUDA counts heads and samples in grid dimensions of at most this size.
MOST_LEADING = 65_535

Grads = tuple[Tensor, Tensor, Tensor]


class KernelAttention(torch.autograd.Function):
    """softmax(scale · q kᵀ) v by the blocked kernel, or on CPU by torch's fused one.

    Returns the result and, where `keep`, what the backward pass recomputes the weights from.
    Where gradients of gradients are wanted the backward pass takes the plain form.
    """

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        kernel: str,
        rounded: bool,
        budget: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        if kernel == "sdpa":
            return fused_forward(q, k, v, scale, rounded, keep)
        run = blocked_op if torch.compiler.is_compiling() else blocked
        return run(q, k, v, scale, rounded, budget, keep)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, *ctx.rest = inputs
        out, lse = output
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        scale, kernel, rounded, budget, _ = ctx.rest
        none = (None,) * 5
        if grad is None:
            return (None, None, None, *none)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return (*plain_backward(grad, q, k, v, scale), *none)
        if kernel == "sdpa":
            return (*fused_backward(grad, q, k, v, out, lse, scale, rounded), *none)
        run = blocked_grad_op if torch.compiler.is_compiling() else blocked_grad
        return (*run(grad, q, k, v, out, lse, scale, rounded, budget), *none)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        size = info.batch_size

        def fold(x: Tensor, dim: int | None) -> Tensor:
            x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1)

        folded = [fold(x, dim) for x, dim in zip((q, k, v), in_dims[:3], strict=True)]
        # Inside vmap a tensor does not show that it is differentiated outside of it.
        *settings, keep = rest
        keep = keep or (torch.is_grad_enabled() and any(x.requires_grad for x in folded))
        out, lse = KernelAttention.apply(*folded, *settings, keep)
        lse = lse.unflatten(0, (size, -1)) if lse.numel() else lse.expand(size, 0)
        return (out.unflatten(0, (size, -1)), lse), (0, 0)


class EagerKernelAttention(torch.autograd.Function):
    """`KernelAttention` for eager autograd: what torch.func needs costs a call 0.2 ms."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        out, lse = KernelAttention.forward(q, k, v, *rest)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = rest
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return KernelAttention.backward(ctx, grad, None)


def blocked(
    q: Tensor, k: Tensor, v: Tensor, scale: float, rounded: bool, budget: int, keep: bool
) -> tuple[Tensor, Tensor]:
    """The blocked kernel on (b, g, n, d); lse is (b, g, n), or (0,) unless `keep`."""
    b, g, n, _ = q.shape
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    out, lse = blocked_forward(q, k, v, scale, rounded, budget, keep)
    return out.view(b, g, n, -1), lse.view(b, g, n) if keep else lse


def blocked_grad(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    rounded: bool,
    budget: int,
) -> Grads:
    """Gradients of `blocked` for q, k, v."""
    flat = [x.flatten(0, 1) for x in (grad, q, k, v, out, lse)]
    grad3, q3, k3, v3, out3, lse3 = flat
    dq, dk, dv = blocked_backward(grad3, q3, k3, v3, out3, lse3, scale, rounded, budget)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


# Opaque to torch.compile, which would unroll the loops over blocks.
blocked_op = torch.library.custom_op(
    "regard::blocked_attention",
    blocked,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, float scale, bool rounded, SymInt budget, bool keep) "
    "-> (Tensor, Tensor)",
)
blocked_grad_op = torch.library.custom_op(
    "regard::blocked_attention_grad",
    blocked_grad,
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float scale, "
    "bool rounded, SymInt budget) -> (Tensor, Tensor, Tensor)",
)


@blocked_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, rounded: bool, budget: int, keep: bool) -> Any:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(
        q.shape[:3] if keep else 0, dtype=wide
    )


@blocked_grad_op.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def fused_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, rounded: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    """torch's fused kernel for CPU: the result and lse (b, g, n).

    Its bfloat16 forward pass is fast on any CPU, its backward only with bfloat16 instructions.
    """
    held = precision(q.dtype, "cpu", rounded).weight
    if q.dtype == torch.bfloat16 and not keep:
        held = q.dtype
    qw, kw, vw = readable(held, q, k, v)
    if not keep:  # the same kernel behind a shorter call
        out = scaled_dot_product_attention(qw, kw, vw, scale=scale)
        return like(out, v.shape[-1], q.dtype), out.new_empty(0)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        qw, kw, vw, scale=scale
    )
    return like(out, v.shape[-1], q.dtype), lse


def fused_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    rounded: bool,
) -> Grads:
    """Gradients of `fused_forward` for q, k, v."""
    held = precision(q.dtype, "cpu", rounded).weight
    qw, kw, vw, gw, ow = readable(held, q, k, v, grad, out)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        gw, qw, kw, vw, ow, lse, 0.0, False, scale=scale
    )
    d, e = q.shape[-1], v.shape[-1]
    return like(dq, d, q.dtype), like(dk, d, k.dtype), like(dv, e, v.dtype)


def readable(dtype: torch.dtype, *operands: Tensor) -> list[Tensor]:
    """Operands in `dtype`, as torch's fused kernel for CPU reads them.

    Rows are contiguous and do not overlap, and all are as wide as the widest: zeros added on the
    right change no score and no value.
    """
    width = max([x.shape[-1] for x in operands])
    ready = []
    for x in operands:
        *_, between, within = x.stride()
        as_it_is = within == 1 and between >= width == x.shape[-1] and x.dtype == dtype
        ready.append(x if as_it_is else rows_of(x, dtype, width))
    return ready


def rows_of(x: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """x in `dtype`, its rows contiguous and `width` wide, with zeros on the right."""
    x = x.to(dtype)
    if x.shape[-1] < width:
        x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 and x.stride(-2) >= width else x.contiguous()


def like(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The first `width` columns of x in `dtype`; x itself where it is that."""
    if x.shape[-1] == width and x.dtype == dtype:
        return x
    return x[..., :width].to(dtype)


class NativeAttention(torch.autograd.Function):
    """torch's own attention with its own gradient, and the plain form's for gradients of it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(q, k, v)
        with torch.enable_grad():
            inputs = tuple(x.detach().requires_grad_(x.requires_grad) for x in (q, k, v))
            out = native(inputs[0], inputs[1], inputs[2], scale)
        ctx.graph = inputs, out
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (*plain_backward(grad, q, k, v, ctx.scale), None)
        inputs, out = ctx.graph
        wanted = [x for x in inputs if x.requires_grad]
        grads = iter(torch.autograd.grad(out, wanted, grad, retain_graph=True))
        return (*(next(grads) if x.requires_grad else None for x in inputs), None)


def native(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """torch's attention, in as many calls as its limit on leading dimensions asks."""
    if q.device.type == "mps":
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, scale=scale)

    return in_pieces(in_pieces(call, 0), 1)(q, k, v)


def in_pieces(call: Callable[..., Tensor], dim: int) -> Callable[..., Tensor]:
    """`call` made on at most MOST_LEADING entries of dimension `dim` at a time."""

    def pieces(*operands: Tensor) -> Tensor:
        if operands[0].shape[dim] <= MOST_LEADING:
            return call(*operands)
        split = zip(*(x.split(MOST_LEADING, dim) for x in operands), strict=True)
        return torch.cat([call(*part) for part in split], dim)

    return pieces
