"""The arithmetic of exact attention: the plain form, and the blocked one with its gradient.

Index sums, for one head: s_ij = scale Σ_t q_it k_jt,  p_ij = exp(s_ij - lse_i),
o_it = Σ_j p_ij v_jt,  with lse_i = log Σ_j exp s_ij.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard import _device as hardware


class Precision(NamedTuple):
    """The dtypes of one computation.

    `operand` is what q and k (and in backward the gradient and v) are held in for the products
    that give scores, `score` what those products give, `weight` what the softmax's weights are
    held in for the products that follow. `bf16_mode`: float32 operands hold bfloat16 numbers and
    are multiplied as such, exactly, with float32 sums.
    """

    operand: torch.dtype
    score: torch.dtype
    weight: torch.dtype
    bf16_mode: bool = False


def precision(dtype: torch.dtype, device: str, rounded: bool) -> Precision:
    """How to compute with inputs of `dtype`; `rounded` allows scores in half precision."""
    if dtype not in (torch.bfloat16, torch.float16):
        return Precision(dtype, dtype, dtype)
    wide = torch.float32
    if device != "cpu":
        score = dtype if rounded else wide
        # No device but CUDA multiplies half precision into float32 results.
        operand = dtype if rounded or device == "cuda" else wide
        return Precision(operand, score, dtype)
    if dtype == torch.bfloat16 and hardware.BF16_PRODUCTS:
        if rounded:
            return Precision(dtype, dtype, dtype)
        return Precision(wide, wide, dtype, bf16_mode=True)
    return Precision(wide, wide, wide)


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, rounded: bool) -> Tensor:
    """softmax(scale · q kᵀ) v as it is written, differentiable any number of times.

    Operands are (b, g, …); with one leading dimension torch takes the shortest way to its products.
    """
    held = precision(q.dtype, q.device.type, rounded).score
    queries, keys, values = (x.to(held).flatten(0, 1) for x in (q, k, v))
    weights = torch.softmax(torch.bmm(queries * scale, keys.transpose(1, 2)), dim=-1)
    return torch.bmm(weights, values).unflatten(0, q.shape[:2]).to(q.dtype)


def plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `plain` for q, k, v in differentiable operations, for gradients of them."""
    wide = torch.promote_types(q.dtype, torch.float32)
    g, qw, kw, vw = (x.to(wide) for x in (grad, q, k, v))
    p = torch.softmax((qw * scale) @ kw.transpose(-1, -2), dim=-1)
    dp = g @ vw.transpose(-1, -2)
    ds = p * (dp - (dp * p).sum(dim=-1, keepdim=True)) * scale
    grads = ds @ kw, ds.transpose(-1, -2) @ qw, p.transpose(-1, -2) @ g
    return grads[0].to(q.dtype), grads[1].to(k.dtype), grads[2].to(v.dtype)


@contextmanager
def bf16_products(wanted: bool) -> Iterator[None]:
    """Let oneDNN multiply float32 operands as bfloat16; the setting is the process's."""
    if not wanted:
        yield
        return
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def blocks(heads: int, n: int, m: int, score_bytes: int, budget: int) -> tuple[int, int]:
    """How many heads, and of each how many queries, a block of at most `budget` bytes takes."""
    rows = max(1, budget // (score_bytes * m))
    if rows >= n:
        return min(heads, rows // n), n
    pieces = -(-n // rows)
    return 1, -(-n // pieces)


def _product(a: Tensor, b: Tensor, scale: float, held: Precision, out: Tensor) -> Tensor:
    """out[g, i, j] = scale Σ_t a[g, i, t] b[g, j, t] in `out`'s dtype."""
    if a.dtype != out.dtype:
        return torch.bmm(a, b.transpose(1, 2), out_dtype=out.dtype).mul_(scale)
    with bf16_products(held.bf16_mode):
        return torch.baddbmm(out, a, b.transpose(1, 2), beta=0, alpha=scale, out=out)


def blocked_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, rounded: bool, budget: int, keep: bool
) -> tuple[Tensor, Tensor]:
    """Attention of q (L, n, d), k (L, m, d), v (L, m, e) in blocks of heads and queries.

    Returns the result (L, n, e) and, where `keep`, lse (L, n) in float32 or wider, else an empty
    tensor.
    """
    heads, n, _ = q.shape
    m = k.shape[1]
    held = precision(q.dtype, q.device.type, rounded)
    step, rows = blocks(heads, n, m, held.score.itemsize, budget)
    scores = q.new_empty(step * rows * m, dtype=held.score)
    out = q.new_empty(heads, n, v.shape[2])
    lse = q.new_empty((heads, n) if keep else 0, dtype=torch.promote_types(q.dtype, torch.float32))
    for h in range(0, heads, step):
        some = slice(h, h + step)
        keys = k[some].to(held.operand)
        values = v[some].to(held.operand if held.bf16_mode else held.weight)
        for r in range(0, n, rows):
            part = slice(r, r + rows)
            queries = q[some, part].to(held.operand)
            shape = (queries.shape[0], queries.shape[1], m)
            s = scores[: shape[0] * shape[1] * m].view(shape)
            s = _product(queries, keys, scale, held, s)
            p, log_sum = _softmax(s, keep)
            if keep:
                lse[some, part] = log_sum
            _weighted_sum(p, values, held, out[some, part])
    return out, lse


def _weighted_sum(p: Tensor, values: Tensor, held: Precision, out: Tensor) -> None:
    """out[g, i, t] = Σ_j p[g, i, j] values[g, j, t]; p's memory may be written over.

    Where products round their operands to bfloat16, weights are rounded as shares of the largest
    of their row, which so is exact: a dominant weight below 1 would lose up to half a step.
    """
    if held.bf16_mode:
        largest = p.amax(dim=-1, keepdim=True)
        with bf16_products(wanted=True):
            out.copy_(torch.bmm(p.div_(largest), values).mul_(largest))
    elif held.weight == out.dtype:
        torch.bmm(p.to(held.weight), values, out=out)
    else:
        out.copy_(torch.bmm(p.to(held.weight), values))


def _softmax(s: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """Softmax of s over its last dimension, in s's memory on CPU; and lse where `keep`.

    The largest weight of a row is exp(largest score - lse), which costs less than a sum of
    exponentials of its own; weights in half precision are too coarse for that.
    """
    out = s if s.device.type == "cpu" else None
    if not keep:
        return torch.softmax(s, dim=-1, out=out), s
    if s.dtype in (torch.bfloat16, torch.float16):
        log_sum = torch.logsumexp(s.float(), dim=-1)
        return torch.softmax(s, dim=-1, out=out), log_sum
    largest = s.amax(dim=-1)
    p = torch.softmax(s, dim=-1, out=out)
    return p, largest - p.amax(dim=-1).log_()


def blocked_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    rounded: bool,
    budget: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for q, k and v, with the weights computed again from lse, block by block.

    dv_jt = Σ_i p_ij g_it;  ds_ij = p_ij (Σ_t g_it v_jt - Σ_t g_it o_it);
    dq_it = scale Σ_j ds_ij k_jt;  dk_jt = scale Σ_i ds_ij q_it.
    """
    heads, n, _ = q.shape
    m = k.shape[1]
    held = precision(q.dtype, q.device.type, rounded)
    step, rows = blocks(heads, n, m, held.score.itemsize, budget)
    buffers = q.new_empty(2, step * rows * m, dtype=held.score)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    inner = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
    for h in range(0, heads, step):
        some = slice(h, h + step)
        keys, values = k[some].to(held.operand), v[some].to(held.operand)
        sum_k, sum_v = (torch.zeros_like(x[some], dtype=lse.dtype) for x in (dk, dv))
        for r in range(0, n, rows):
            part = slice(r, r + rows)
            queries, g = q[some, part].to(held.operand), grad[some, part].to(held.operand)
            shape = (g.shape[0], g.shape[1], m)
            s, t = (x[: shape[0] * shape[1] * m].view(shape) for x in buffers)
            s = _product(queries, keys, scale, held, s)
            p = s.sub_(lse[some, part, None]).exp_()
            ds = _product(g, values, 1.0, held, t).sub_(inner[some, part, None]).mul_(p)
            p, ds = p.to(held.weight), ds.to(held.weight)
            _accumulate(sum_v, p, g.to(held.weight), 1.0)
            _accumulate(sum_k, ds, queries.to(held.weight), scale)
            # scaled before it is rounded
            nothing = ds.new_empty(()).expand(len(ds), ds.shape[1], keys.shape[2])
            dq[some, part] = torch.baddbmm(nothing, ds, keys.to(held.weight), beta=0, alpha=scale)
        dk[some], dv[some] = sum_k, sum_v
    return dq, dk, dv


def _accumulate(total: Tensor, weights: Tensor, rows: Tensor, scale: float) -> None:
    """total[g, j, t] += scale Σ_i weights[g, i, j] rows[g, i, t]."""
    if total.dtype == weights.dtype:
        total.baddbmm_(weights.transpose(1, 2), rows, alpha=scale)
    else:
        total.add_(torch.bmm(weights.transpose(1, 2), rows), alpha=scale)


# Kernels as differentiable operations: under autograd, torch.func and torch.compile.
#
# `attend` brings its operands to four dimensions (b, g, n, d) before it comes here.


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
