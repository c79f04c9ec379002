"""Who watches attention: a list that `attend` consults at every call, empty but for recording."""

import functools
import math
import numbers
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple, cast, overload

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from regard import _device as hardware
from regard.errors import InputError, nearest
from regard.layers.attend_kernels import (
    EagerKernelAttention,
    KernelAttention,
    NativeAttention,
    blocks,
    native,
    plain,
    precision,
)
from regard.layers.checks import count

#: Called in place of `attend` with q, k, v and its options, the last entry first. It computes the
#: result by calling `attend` without itself in the list.
observers: list[Callable[[Tensor, Tensor, Tensor, dict[str, Any]], Tensor]] = []


# Which kernel `attend` uses, and why: the rule, and the two settings that override it.
#
# The numbers in the rule come from the kernel table in docs/benchmarks.md; remake it with
# `python -m benchmarks.attend --kernels` on the machine in question.


KERNELS = ("plain", "sdpa", "blocked")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Widest head that the fused kernels of CUDA (flash, cuDNN) take.
CUDA_FUSED_WIDTH = 256
# With fewer keys than the widest vectors hold floats, torch's fused kernel on CPU gives zeros for
# a query that holds NaN (seen in 2.14 with fewer than 8 on AVX2).
FUSED_FEWEST_KEYS = 16
# bfloat16 where the CPU has instructions for it: torch's fused kernel is further from the GEMM
# limit there, most of all with at most so many keys.
BF16_FEW_KEYS = 256
# The rounded scores that are worth keeping there for the backward pass.
BF16_KEPT_BYTES = 8 << 20
# In training on CPU the plain form keeps its scores for the backward pass and the fused kernel
# computes them again, at a cost that grows with the width of a head: keeping up to so many bytes
# of scores is faster, twice as many where heads are wide.
KEPT_SCORE_BYTES = 4 << 20
WIDE_HEAD = 256


class Settings(NamedTuple):
    """What the user forces: see `attention_kernel`."""

    kernel: str | None = None
    score_dtype: torch.dtype | None = None
    cache_bytes: int | None = None


NOTHING_FORCED = Settings()
_settings = NOTHING_FORCED


def settings() -> Settings:
    """The settings in force."""
    return _settings


@contextmanager
def attention_kernel(
    kernel: str,
    *,
    score_dtype: torch.dtype | None = None,
    cache_bytes: int | None = None,
) -> Iterator[None]:
    """Force the kernel of every `attend` in the block whose own `kernel` is "auto".

    `kernel` is "plain", "sdpa", "blocked" or "auto". `score_dtype` takes the place of every
    call's own. `cache_bytes` sets the bytes of scores that the blocked kernel holds at a time (by
    default 2 MiB on CPU, 256 MiB elsewhere). The settings are the process's, not the thread's.
    What a forward pass chose, its backward pass uses.
    """
    check_kernel(kernel)
    if cache_bytes is not None:
        count(cache_bytes, "cache_bytes")
    if score_dtype is not None:
        check_score_dtype(score_dtype)
    global _settings
    before = _settings
    _settings = Settings(
        None if kernel == "auto" else kernel,
        score_dtype or before.score_dtype,
        cache_bytes or before.cache_bytes,
    )
    try:
        yield
    finally:
        _settings = before


def check_score_dtype(score_dtype: torch.dtype) -> None:
    """Refuse a dtype that holds no scores."""
    if score_dtype not in FLOATS:
        raise InputError(f"score_dtype={score_dtype!r}: give torch.float32 or q's dtype")


def rounds_faster(q: Tensor) -> bool:
    """Whether scores of eager calls on q's kind are computed faster when rounded to its dtype.

    So it is where the CPU multiplies bfloat16, whatever the shape; elsewhere scores stay wide.
    """
    if q.dtype != torch.bfloat16 or q.device.type != "cpu" or not hardware.BF16_PRODUCTS:
        return False
    return not hardware.is_traced()


def check_kernel(kernel: str) -> None:
    """Refuse a name that is no kernel."""
    if not isinstance(kernel, str) or kernel not in ("auto", *KERNELS):
        raise InputError(
            f"kernel={kernel!r} is unknown; it is auto or one of {', '.join(KERNELS)} "
            f"({nearest(str(kernel), KERNELS)})"
        )


def block_bytes(device: str) -> int:
    """Bytes of scores that the blocked kernel holds at a time."""
    if _settings.cache_bytes is not None:
        return _settings.cache_bytes
    return (2 << 20) if device == "cpu" else (256 << 20)


class Problem(NamedTuple):
    """What the choice depends on.

    `heads` counts all leading dimensions together; `rounded`: scores may be held in half
    precision; `bf16_products`: the CPU has instructions for products of bfloat16 numbers.
    """

    device: str
    dtype: torch.dtype
    heads: int
    n: int
    m: int
    d: int
    e: int
    grad: bool
    rounded: bool
    bf16_products: bool

    @property
    def score_bytes(self) -> int:
        """Bytes of all scores at once."""
        width = self.dtype.itemsize if self.rounded else max(4, self.dtype.itemsize)
        return self.heads * self.n * self.m * width

    @property
    def half(self) -> bool:
        return self.dtype in (torch.bfloat16, torch.float16)


class Choice(NamedTuple):
    kernel: str
    reason: str


def choose(problem: Problem, kernel: str = "auto", forced: Settings = NOTHING_FORCED) -> Choice:
    """The kernel for `problem`, with the reason in a sentence."""
    if problem.heads == 0 or problem.n == 0:
        return Choice("plain", "the result is empty")
    if kernel != "auto":
        return Choice(kernel, f"kernel={kernel!r} was asked for")
    if forced.kernel is not None:
        return Choice(forced.kernel, f"attention_kernel({forced.kernel!r}) is in force")
    if problem.device != "cpu":
        return _choose_accelerator(problem)
    if problem.m < FUSED_FEWEST_KEYS:
        return Choice("plain", "with so few keys torch's fused kernel on CPU hides a NaN query")
    if problem.dtype == torch.bfloat16 and problem.bf16_products:
        return _choose_bf16_cpu(problem)
    return _choose_cpu(problem)


def _choose_accelerator(problem: Problem) -> Choice:
    if problem.device == "cuda" and max(problem.d, problem.e) > CUDA_FUSED_WIDTH:
        return Choice(
            "blocked",
            f"heads of width {max(problem.d, problem.e)} are wider than the {CUDA_FUSED_WIDTH} "
            "that CUDA's fused kernels take",
        )
    return Choice("sdpa", f"torch's fused attention is fastest on {problem.device}")


def _choose_cpu(problem: Problem) -> Choice:
    """float32 and float64; also half precision computed in float32, for want of instructions."""
    if problem.d != problem.e:
        return Choice("blocked", "torch's fused kernel on CPU needs values as wide as keys")
    if problem.dtype == torch.bfloat16 and not problem.grad:
        return Choice("sdpa", "torch's fused kernel needs no float32 copies of bfloat16 operands")
    if not problem.grad:
        return Choice("sdpa", "torch's fused kernel is fastest")
    kept = KEPT_SCORE_BYTES * (2 if problem.d >= WIDE_HEAD else 1)
    if problem.score_bytes <= kept:
        return Choice("plain", f"all scores fit in {kept >> 20} MiB, kept for backward")
    return Choice("sdpa", f"scores beyond {kept >> 20} MiB cost less computed again than kept")


def _choose_bf16_cpu(problem: Problem) -> Choice:
    """bfloat16 where the CPU multiplies it: the fused kernel is far from the GEMM limit there."""
    if problem.rounded:
        if problem.grad and problem.score_bytes <= BF16_KEPT_BYTES:
            return Choice("plain", "rounded scores are allowed, and fit in cache until backward")
        return Choice("blocked", "rounded scores are allowed, and run at the GEMM limit in blocks")
    wide = problem.d >= 256 or problem.m <= BF16_FEW_KEYS if problem.grad else problem.d >= 64
    if problem.d != problem.e or wide:
        return Choice("blocked", "bfloat16 products with float32 scores win in blocks here")
    return Choice("sdpa", "heads are narrow, and torch's fused kernel is fastest")


# What one call of `attend` will do, worked out once for operands of the same kind.
#
# Beside products that have emptied the caches, each line of Python costs microseconds: a plan is
# kept, and a later call with the same shapes, dtypes and devices looks it up.


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


# Exact softmax attention: one function that everything else calls.


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


# Which kernel runs, why, and what it costs.


class Explanation(NamedTuple):
    """One call of `attend`.

    Attributes:
        kernel: "plain", "sdpa" or "blocked".
        reason: why, in a sentence.
        problem: device, dtype, heads (all leading dimensions), n, m, d, e, whether gradients are
            needed and whether scores may be rounded.
        score_dtype: what scores are held in.
        flops: multiplications and additions of the products; with gradients, of both passes, the
            scores computed anew in backward unless the kernel is plain.
        peak_bytes: predicted memory beyond inputs and output at the peak of the pass, or of the
            two passes with gradients (gradients of q, k and v included).
    """

    kernel: str
    reason: str
    problem: Problem
    score_dtype: torch.dtype
    flops: int
    peak_bytes: int

    def __str__(self) -> str:
        p = self.problem
        passes = "forward and backward" if p.grad else "forward"
        return (
            f"{self.kernel}: {self.reason}. {p.heads} × ({p.n} queries, {p.m} keys, width {p.d}), "
            f"{str(p.dtype).removeprefix('torch.')} on {p.device}, scores in "
            f"{str(self.score_dtype).removeprefix('torch.')}; {passes}: {self.flops / 1e9:.3g} "
            f"GFLOP, at most {self.peak_bytes / 2**20:.3g} MiB beyond inputs and output"
        )


@overload
def explain(of: Tensor, k: Tensor, v: Tensor, **options: Any) -> Explanation: ...
@overload
def explain(of: nn.Module, *inputs: Any, **options: Any) -> list[Explanation]: ...
def explain(of: Any, *inputs: Any, **options: Any) -> Any:
    """What `attend` chooses, why, and its cost.

    explain(q, k, v, **options), with the arguments of `attend`, gives one `Explanation`.
    explain(module, *inputs, **options) calls the module and gives one for each `attend` inside,
    in the order of the calls; a compiled module cannot be listened to.

    Raises:
        InputError: where the module makes no call of `attend`, or neither q, k and v nor a module
            came.
    """
    if not isinstance(of, nn.Module) and len(inputs) != 2:
        raise InputError(
            f"a {type(of).__name__} came, and {len(inputs)} after it; give q, k and v, or a module "
            "and its inputs"
        )
    heard: list[Explanation] = []
    call = of if isinstance(of, nn.Module) else None

    def listen(problem: Problem, choice: Choice) -> None:
        heard.append(_explain(problem, choice))

    listeners.append(listen)
    try:
        if call is None:
            attend(of, *inputs, **options)
        else:
            call(*inputs, **options)
    finally:
        listeners.remove(listen)
    if not heard:
        raise InputError(
            f"{type(of).__name__} made no call of attend, so there is nothing to explain; give a "
            "module built on attend and not compiled"
        )
    return heard if call is not None else heard[0]


def _explain(problem: Problem, choice: Choice) -> Explanation:
    held = precision(problem.dtype, problem.device, problem.rounded)
    score = held.weight if choice.kernel == "sdpa" else held.score
    if choice.kernel == "sdpa" and score.itemsize < 4:
        score = torch.float32  # torch's fused kernels sum and hold scores in float32
    return Explanation(
        choice.kernel,
        choice.reason,
        problem,
        score,
        _flops(problem, choice.kernel),
        _peak_bytes(problem, choice.kernel),
    )


def _flops(problem: Problem, kernel: str) -> int:
    pairs = problem.heads * problem.n * problem.m
    scores, mixing = 2 * pairs * problem.d, 2 * pairs * problem.e
    if not problem.grad:
        return scores + mixing
    again = 0 if kernel == "plain" else scores
    return (scores + mixing) + again + 2 * (scores + mixing)


def _peak_bytes(p: Problem, kernel: str) -> int:
    """Scratch, copies in another dtype, and with gradients what is kept and returned."""
    held = precision(p.dtype, p.device, p.rounded)
    item = p.dtype.itemsize
    inputs = p.heads * (p.n * p.d + p.m * (p.d + p.e))
    results = p.heads * p.n * p.e
    if kernel == "plain":
        # Forward: scores and weights; backward: weights kept, their gradient and the scores'.
        copies = (inputs + results) * held.score.itemsize if p.half else 0
        return p.heads * p.n * p.m * held.score.itemsize * (3 if p.grad else 2) + copies
    if kernel == "sdpa":
        wide = held.weight.itemsize if p.device == "cpu" and held.weight != p.dtype else 0
        copies = (inputs + results) * wide
        if not p.grad:
            return copies
        return 2 * copies + inputs * item + p.heads * p.n * 4
    step, rows = blocks(p.heads, p.n, p.m, held.score.itemsize, block_bytes(p.device))
    pairs = step * rows * p.m
    block = pairs * (held.score.itemsize + (0 if held.score == held.weight else 2))
    block += step * (rows * p.d + p.m * (p.d + p.e)) * held.operand.itemsize
    if not p.grad:
        return block
    sums = step * p.m * (p.d + p.e) * 4
    return 2 * block + sums + inputs * item + p.heads * p.n * 8 + results * 4
