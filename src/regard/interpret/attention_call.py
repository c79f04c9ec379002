"""Memory that a recording uses again and again."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Scratch:
    """Buffers by name, each as large as the largest use so far.

    Fresh memory costs a recording as much as its arithmetic: the system hands it out, zeroed, a
    page at a time.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype, torch.device, bool], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor of `shape`, with like's dtype and device; the next `take` of
        the same name overwrites it.
        """
        # Tensors made in inference mode cannot be used outside.
        key = name, like.dtype, like.device, torch.is_inference_mode_enabled()
        held = self._held.get(key)
        if held is None or (count := math.prod(shape)) > held.numel():
            held = self._held[key] = like.new_empty(shape)
        return held if held.shape == shape else held.view(-1)[:count].view(shape)


# One call of an attention, as the model made it, and its weights a block at a time.


# Bytes of scores in one block, at most: a CPU's cache holds them. A block has at least so many rows
# of a head, or all of them, so that the product is worth its reading of the keys.
BLOCK_BYTES = 2 << 20
LEAST_ROWS = 64


class Block(NamedTuple):
    """Logits (heads, rows, m) of some of the b · g heads of all images, for use before the next.

    They may be overwritten.
    """

    heads: slice
    rows: slice
    logits: Tensor


@dataclass(frozen=True)
class Call:
    """What one attention was given.

    Either queries q (b, g, n, d), keys k (b, g, m, d), `scale` and an additive `mask`
    broadcastable to (b, g, n, m); or, where the model made its own softmax, its `logits` and
    `weights` (b, g, n, m), or the one of them that it has not written over. `v` (b, g, m, e) are
    the values; `out` is the tensor that carries the result in the model's graph, and `to_heads`
    turns a gradient of it into one of the heads' outputs (b, g, n, e). Where there were three
    dimensions they are (b, 1, …), `merged`, and b may be images · heads: see `apart`.
    """

    v: Tensor
    out: Tensor | None
    to_heads: Callable[[Tensor], Tensor]
    q: Tensor | None = None
    k: Tensor | None = None
    scale: float = 1.0
    mask: Tensor | None = None
    causal: bool = False
    logits: Tensor | None = None
    weights: Tensor | None = None
    merged: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(b, g, n, m)."""
        made = self.weights if self.weights is not None else self.logits
        if made is not None:
            b, g, n, m = made.shape
            return b, g, n, m
        assert self.q is not None, "a call has queries and keys, or logits, or weights"
        assert self.k is not None
        b, g, n, _ = self.q.shape
        return b, g, n, self.k.shape[2]

    def without_graph(self) -> "Call":
        """The same on detached tensors; `out` keeps its graph."""
        names = ("v", "q", "k", "mask", "logits", "weights")
        values: dict[str, Tensor | None] = {name: getattr(self, name) for name in names}
        cut: dict[str, Any] = {
            name: t.detach() for name, t in values.items() if t is not None and t.requires_grad
        }
        return replace(self, **cut) if cut else self

    def first(self, images: int) -> "Call":
        """The same call for the first `images` of the batch."""
        mask = self.mask
        if mask is not None and mask.ndim == 4 and mask.shape[0] > 1:
            mask = mask[:images]
        names = ("v", "q", "k", "logits", "weights")
        cut: dict[str, Any] = {name: getattr(self, name) for name in names}
        cut = {name: None if t is None else t[:images] for name, t in cut.items()}
        return replace(self, mask=mask, **cut)

    def apart(self, batch: int) -> "Call":
        """The same call of `batch` images, the heads merged into them taken apart."""

        def four(x: Tensor) -> Tensor:
            return x.unflatten(0, (batch, -1)).flatten(1, 2)  # (b g) 1 n d -> b g n d

        names = ("v", "q", "k", "logits", "weights")
        tensors: dict[str, Any] = {name: getattr(self, name) for name in names}
        tensors = {name: None if t is None else four(t) for name, t in tensors.items()}
        mask, to_heads = self.mask, self.to_heads
        if mask is not None and mask.ndim == 4 and mask.shape[0] > 1:
            mask = four(mask)
        return replace(
            self, mask=mask, to_heads=lambda x: four(to_heads(x)), merged=False, **tensors
        )

    def without_keys(self) -> Tensor | None:
        """Which queries (b · g, n, 1) may attend to no key; None where each may to some."""
        b, g, n, _ = self.shape
        made = self.logits if self.logits is not None else self.mask
        if made is None and self.weights is not None:
            return self.weights[..., :1].isnan().flatten(0, 1)
        if made is None:
            return None
        return (made.amax(-1, keepdim=True) == -torch.inf).expand(b, g, n, 1).flatten(0, 1)

    def weight_without_keys(self) -> Tensor:
        """What such a query gives each key: NaN from a softmax, 0 from most fused kernels.

        Which of them a module of torch's ran shows in its result alone.
        """
        if self.q is None:
            return self.v.new_tensor(torch.nan, dtype=wide_dtype(self.v))
        zero = self.v.new_zeros((), dtype=wide_dtype(self.v))
        return zero if self.out is None else zero.masked_fill(self.out.isnan().any(), torch.nan)

    def rows(self, index: Tensor) -> Tensor:
        """Weights (b, g, len(index), m) of the chosen queries, float32 or wider."""
        if self.weights is not None:
            return wide(self.weights[:, :, index])
        b, g = self.shape[:2]
        q, k = self._operands(slice(0, b))
        logits = self._logits(q[:, index], None if k is None else k.mT, Scratch(), 1.0)
        self._mask(logits, slice(0, b), slice(0, g), index, 1.0)
        weights = logits.softmax(-1)
        if (without := self.without_keys()) is not None:
            weights.masked_fill_(without[:, index], self.weight_without_keys())
        return weights.unflatten(0, (b, g))

    def blocks(self, scratch: Scratch, factor: float = 1.0) -> Iterator[Block]:
        """All logits, times `factor`, in blocks of bounded size.

        That is `BLOCK_BYTES`, or less: half of what queries, keys, values and result take, so that
        the two buffers of a reduction are no more than the attention itself holds. Heads stay
        together as long as they can, which divides a block evenly among a CPU's threads.
        """
        b, g, n, _ = self.shape
        images, heads, rows = self._block_size()
        for first in range(0, b, images):
            some = slice(first, first + images)
            q, k = self._operands(some)
            # Beside products that empty the caches each call costs microseconds: few are made.
            for head in range(0, q.shape[0], images * heads):
                these = slice(head, head + images * heads)
                keys = None if k is None else k[these].mT
                for start in range(0, n, rows):
                    part = slice(start, start + rows)
                    logits = self._logits(q[these, part], keys, scratch, factor)
                    self._mask(logits, some, these, part, factor)
                    place = first * g + head
                    yield Block(slice(place, place + logits.shape[0]), part, logits)

    def _block_size(self) -> tuple[int, int, int]:
        """Images, heads and rows of a block; several images only with all their heads and rows."""
        b, g, n, m = self.shape
        row = m * wide_dtype(self.v).itemsize
        held = 4 * max(self.v.numel(), b * g * n * self.v.shape[-1]) * row // m
        size = min(BLOCK_BYTES, held // 2)
        least = min(n, LEAST_ROWS)
        heads = _even(g, size // (row * least))
        rows = _even(n, max(least, size // (row * heads)))
        images = _even(b, size // (row * n * g)) if (heads, rows) == (g, n) else 1
        return images, heads, rows

    def _operands(self, images: slice) -> tuple[Tensor, Tensor | None]:
        """q and k (images · g, …) of some images; where the model made its own softmax, its logits
        or else its weights, and None.
        """
        if self.q is None or self.k is None:
            made = self.logits if self.logits is not None else self.weights
            assert made is not None, "a call has queries and keys, or logits, or weights"
            return wide(made[images]).flatten(0, 1), None
        return wide(self.q[images]).flatten(0, 1), wide(self.k[images]).flatten(0, 1)

    def _logits(self, q: Tensor, keys: Tensor | None, scratch: Scratch, factor: float) -> Tensor:
        """factor · scale · q kᵀ (heads, rows, m) from (heads, rows, d) and kᵀ (heads, d, m).

        Where the model made its own softmax q is a part of its logits, and there are no keys; or
        of its weights, whose logarithms are logits less a number for each row.
        """
        width = q.shape[-1] if keys is None else keys.shape[-1]
        logits = scratch.take("logits", (*q.shape[:2], width), q)
        if keys is None:
            if self.logits is None:
                torch.log(q, out=logits).mul_(factor)
            else:
                torch.mul(q, factor, out=logits)
            return logits.clamp_(min=_floor(logits))
        return torch.baddbmm(logits, q, keys, beta=0, alpha=factor * self.scale, out=logits)

    def _mask(
        self, logits: Tensor, images: slice, heads: slice, rows: slice | Tensor, factor: float
    ) -> None:
        """Mask logits (images · heads, rows, m), in place.

        A masked place gets a large negative number: 0 times it is a number, in the entropy.
        """
        if self.mask is None and not self.causal:
            return
        if self.mask is not None:
            mask = self.mask.expand(self.shape)[images, heads][:, :, rows]
            logits.view(mask.shape).add_(mask, alpha=factor)
        if self.causal:
            n, m = self.shape[2:]
            positions = torch.arange(n, device=logits.device)[rows, None]
            logits.masked_fill_(torch.arange(m, device=logits.device) > positions, -torch.inf)
        logits.clamp_(min=_floor(logits))


def _floor(logits: Tensor) -> float:
    return torch.finfo(logits.dtype).min / 4


def wide_dtype(x: Tensor) -> torch.dtype:
    """float32, or float64 where x is that."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    """x in its `wide_dtype`."""
    return x.to(wide_dtype(x))


def _even(total: int, most: int) -> int:
    """The size of the fewest equal parts of at most `most`, which is at least 1."""
    return math.ceil(total / math.ceil(total / min(total, max(1, most))))


# What is kept of attention weights: pure functions, and the same in blocks.


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
