"""What is kept of attention weights: pure functions, and the same in blocks."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from regard.record.calls import Call, wide, wide_dtype
from regard.record.scratch import Scratch

#: What `record(keep=…)` can keep. Shapes: weights (b, g, queries, m), mean (b, queries, m),
#: received (b, g, m), entropy (b, g, n), largest_logit (b, g).
KINDS = ("weights", "mean", "received", "entropy", "largest_logit")


def entropy(weights: Tensor) -> Tensor:
    """-Σ_j A_ij log A_ij in nats (…, n), from weights (…, n, m); 0 log 0 is 0."""
    return torch.special.entr(wide(weights)).sum(-1)


def received(weights: Tensor) -> Tensor:
    """The mean over queries of what each key receives (…, m), from weights (…, n, m)."""
    return weights.mean(-2)


@torch.no_grad()
def reduce_call(call: Call, keep: Iterable[str], scratch: Scratch) -> dict[str, Tensor]:
    """The kinds in `keep` but weights and chosen queries, never holding n × m at once.

    With logits s in units of ln 2, their row maximum t, e_j = 2^(s_j - t), which is cheaper than
    exp, and l = Σ_j e_j: weights are e / l, and the entropy of a row is
    log l - ln 2 · Σ_j e_j (s_j - t) / l, which needs no logarithm of a weight. Two buffers of a
    block's size are held. A block is a few passes over memory that the cache holds, so what each
    pass costs beside them counts: whatever can wait for all blocks does.
    """
    b, g, n, m = call.shape
    kinds = set(keep)
    tops, totals, dots = call.v.new_empty(3, b, g, n, dtype=wide_dtype(call.v)).unbind()
    shapes = {"weights": (b, g, n, m), "mean": (b, n, m), "received": (b, g, m)}
    out = {kind: tops.new_empty(shape) for kind, shape in shapes.items() if kind in kinds}
    for images, heads, rows, logits in call.blocks(scratch, math.log2(math.e)):
        where = images, heads, rows
        top = torch.amax(logits, -1, out=tops[where])
        if kinds == {"largest_logit"}:
            continue
        shifted = logits.sub_(top[..., None])
        e = torch.exp2(shifted, out=scratch.take("e", shifted.shape, shifted))
        total = torch.sum(e, -1, out=totals[where])
        if "entropy" in kinds:
            torch.sum(shifted.mul_(e), -1, out=dots[where])
        if "received" in kinds:
            # Σ_i e_ij / (n l_i) as a product, which takes one reading of e
            sums = out["received"][images, heads].view(-1, 1, m)
            shares, add = total.reciprocal().view(-1, 1, total.shape[-1]), float(rows.start > 0)
            torch.baddbmm(sums, shares, e.flatten(0, 1), beta=add, alpha=1 / n, out=sums)
        if "weights" in kinds or "mean" in kinds:
            weights = e.div_(total[..., None])
            if "weights" in kinds:
                out["weights"][where] = weights
            if "mean" in kinds:
                mean = out["mean"][images, rows]
                torch.sum(weights, 1, out=mean) if heads.start == 0 else mean.add_(weights.sum(1))
    if "mean" in kinds:
        out["mean"] /= g
    if "entropy" in kinds:
        out["entropy"] = torch.addcdiv(totals.log(), dots, totals, value=-math.log(2))
    if "largest_logit" in kinds:
        out["largest_logit"] = math.log(2) * tops.amax(-1)
    if "weights" in out and call.weights is not None:
        out["weights"] = wide(call.weights).clone()  # to the bit those that the model made
    return out
