"""What is kept of attention weights: pure functions, and the same in blocks."""

from collections.abc import Iterable

import torch
from torch import Tensor

from regard.record.calls import Call, wide

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
def reduce_call(call: Call, keep: Iterable[str]) -> dict[str, Tensor]:
    """The kinds in `keep` but weights and chosen queries, never holding n × m at once.

    With logits s, their row maximum t and weights A = softmax(s): the entropy of a row is
    -log max_j A_j - Σ_j A_j (s_j - t), which needs no logarithm of every weight.
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
    for images, heads, rows, weights, logits in call.blocks():
        if "weights" in out:
            out["weights"][images, heads, rows] = weights
        if "mean" in out:
            out["mean"][images, rows] += weights.sum(1) / g
        if "received" in out:
            out["received"][images, heads] += weights.sum(-2) / n
        if "entropy" in out or "largest_logit" in out:
            top = logits.amax(-1, keepdim=True)
        if "largest_logit" in out:
            part = out["largest_logit"][images, heads]
            torch.maximum(part, top.amax((-1, -2)), out=part)
        if "entropy" in out:
            mean_logit = torch.linalg.vecdot(weights, logits - top)
            out["entropy"][images, heads, rows] = -weights.amax(-1).log() - mean_logit
    return out
