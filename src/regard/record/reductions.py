"""What is kept of attention weights: pure functions, and the same in blocks."""

from collections.abc import Iterable

import torch
from torch import Tensor

from regard.record.calls import Call, wide
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

    With logits s, their row maximum t and e_j = exp(s_j - t), l = Σ_j e_j: weights are e / l, and
    the entropy of a row is log l - Σ_j e_j (s_j - t) / l, which needs no logarithm of a weight.
    Two buffers of a block's size are held.
    """
    b, g, n, m = call.shape
    kinds = set(keep)
    like = call.v.new_empty((), dtype=wide(call.v).dtype)
    out: dict[str, Tensor] = {}
    if "weights" in kinds:
        out["weights"] = like.new_empty(b, g, n, m)
    if "mean" in kinds:
        out["mean"] = like.new_zeros(b, n, m)
    if "received" in kinds:
        out["received"] = like.new_zeros(b, g, m)
    if "entropy" in kinds:
        out["entropy"] = like.new_empty(b, g, n)
    if "largest_logit" in kinds:
        out["largest_logit"] = like.new_full((b, g), -torch.inf)
    for images, heads, rows, logits in call.blocks(scratch):
        top = logits.amax(-1, keepdim=True)
        if "largest_logit" in out:
            part = out["largest_logit"][images, heads]
            torch.maximum(part, top.amax((-1, -2)), out=part)
        if kinds == {"largest_logit"}:
            continue
        shifted = logits.sub_(top)
        e = torch.exp(shifted, out=scratch.take("e", tuple(shifted.shape), shifted))
        total = e.sum(-1, keepdim=True)
        if "entropy" in out:
            mean = shifted.mul_(e).sum(-1) / total[..., 0]
            out["entropy"][images, heads, rows] = total[..., 0].log() - mean
        if "received" in out:
            # Σ_i e_ij / l_i as a product, which takes one reading of e
            share = total.reciprocal().mT @ e
            out["received"][images, heads] += share[..., 0, :] / n
        if "weights" in out or "mean" in out:
            weights = e.div_(total)
            if "weights" in out:
                out["weights"][images, heads, rows] = weights
            if "mean" in out:
                out["mean"][images, rows] += weights.sum(1) / g
    if "weights" in out and call.weights is not None:
        out["weights"] = wide(call.weights).clone()  # to the bit those that the model made
    return out
