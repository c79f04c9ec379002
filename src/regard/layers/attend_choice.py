"""Which kernel `attend` uses, and why: the rule, and the two settings that override it.

The numbers in the rule come from the kernel table in docs/benchmarks.md; remake it with
`python -m benchmarks.attend --kernels` on the machine in question.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from regard import hardware
from regard.errors import InputError, nearest
from regard.layers.checks import count

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
