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
    pass costs beside them counts: whatever can wait for all blocks does. A query that no key is
    open to has l = ∞ where its weights are to be 0, and NaN where they are to be that.
    """
    b, g, n, m = call.shape
    kinds = set(keep)
    without = call.without_keys()
    out: dict[str, Tensor] = {}
    if "weights" in kinds and call.weights is not None:
        out["weights"] = wide(call.weights).clone()  # to the bit those that the model made
        kinds.remove("weights")
        if not kinds:
            return out
    tops, totals, dots = call.v.new_empty(3, b * g, n, 1, dtype=wide_dtype(call.v)).unbind()
    weights = tops.new_empty(b * g, n, m) if "weights" in kinds else None
    mean = tops.new_zeros(b, n, m) if "mean" in kinds else None
    received = tops.new_empty(b * g, 1, m) if "received" in kinds else None
    weight_without = tops.new_zeros(()) if without is None else call.weight_without_keys()
    for heads, rows, logits in call.blocks(scratch, math.log2(math.e)):
        top = torch.amax(logits, -1, keepdim=True, out=tops[heads, rows])
        if kinds == {"largest_logit"}:
            continue
        shifted = logits.sub_(top)
        e = torch.exp2(shifted, out=scratch.take("e", shifted.shape, shifted))
        total = torch.sum(e, -1, keepdim=True, out=totals[heads, rows])
        if without is not None:
            total.masked_fill_(without[heads, rows], weight_without.reciprocal())
        if "entropy" in kinds:
            torch.sum(shifted.mul_(e), -1, keepdim=True, out=dots[heads, rows])
        if received is not None:
            # Σ_i e_ij / (n l_i) as a product, which takes one reading of e
            sums, add = received[heads], float(rows.start > 0)
            torch.baddbmm(sums, total.reciprocal().mT, e, beta=add, alpha=1 / n, out=sums)
        if weights is not None or mean is not None:
            e /= total
        if weights is not None:
            weights[heads, rows] = e
        if mean is not None:
            images = slice(heads.start // g, -(-heads.stop // g))
            mean[images, rows] += e.unflatten(0, (-1, min(g, len(e)))).sum(1) / g
    if weights is not None:
        out["weights"] = weights.view(b, g, n, m)
    if mean is not None:
        out["mean"] = mean
    if received is not None:
        out["received"] = received.view(b, g, m)
    if "entropy" in kinds:
        nats = torch.addcdiv(totals.log(), dots, totals, value=-math.log(2))
        if without is not None:
            nats.masked_fill_(without, weight_without)
        out["entropy"] = nats.view(b, g, n)
    if "largest_logit" in kinds:
        if without is not None:
            tops.masked_fill_(without, -torch.inf)
        if call.q is None and call.logits is None:
            tops.fill_(torch.nan)
        out["largest_logit"] = math.log(2) * tops.view(b, g, n).amax(-1)
    return out
