"""Which kernel runs, why, and what it costs."""

from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.layers import attend as attend_module
from regard.layers.attend_choice import Choice, Problem, block_bytes
from regard.layers.attend_kernels import blocks, precision


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

    attend_module.listeners.append(listen)
    try:
        if call is None:
            attend_module.attend(of, *inputs, **options)
        else:
            call(*inputs, **options)
    finally:
        attend_module.listeners.remove(listen)
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
