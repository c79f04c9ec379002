"""One call of an attention, as the model made it, and its weights a block at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.record.scratch import Scratch

# Bytes of float32 scores in one block: they stay in a CPU's cache, and are little beside what a
# forward holds anyway. A block has at least so many rows of a head, or all of them, so that the
# product is worth its reading of the keys.
BLOCK_BYTES = 320 << 10
LEAST_ROWS = 64


class Block(NamedTuple):
    """Logits (images, heads, rows, m) of a part of the batch, to be used before the next block.

    They may be overwritten.
    """

    images: slice
    heads: slice
    rows: slice
    logits: Tensor


@dataclass(frozen=True)
class Call:
    """What one attention was given.

    Either queries q (b, g, n, d), keys k (b, g, m, d), `scale` and an additive `mask`
    broadcastable to (b, g, n, m); or, where the model made its own softmax, its `logits` and
    `weights` (b, g, n, m). `v` (b, g, m, e) are the values; `out` is the tensor that carries the
    result in the model's graph, and `to_heads` turns a gradient of it into one of the heads'
    outputs (b, g, n, e).
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

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(b, g, n, m)."""
        if self.weights is not None:
            b, g, n, m = self.weights.shape
            return b, g, n, m
        q, k = self._queries_keys()
        b, g, n, _ = q.shape
        return b, g, n, k.shape[2]

    def _queries_keys(self) -> tuple[Tensor, Tensor]:
        assert self.q is not None, "a call has queries and keys, or weights"
        assert self.k is not None
        return self.q, self.k

    def without_graph(self) -> "Call":
        """The same on detached tensors; `out` keeps its graph."""
        names = ("v", "q", "k", "mask", "logits", "weights")
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        values = {name: None if t is None else t.detach() for name, t in values.items()}
        return replace(self, **values)

    def first(self, images: int) -> "Call":
        """The same call for the first `images` of the batch."""
        mask = self.mask
        if mask is not None and mask.ndim == 4 and mask.shape[0] > 1:
            mask = mask[:images]
        names = ("v", "q", "k", "logits", "weights")
        cut: dict[str, Any] = {name: getattr(self, name) for name in names}
        cut = {name: None if t is None else t[:images] for name, t in cut.items()}
        return replace(self, mask=mask, **cut)

    def rows(self, index: Tensor) -> Tensor:
        """Weights (b, g, len(index), m) of the chosen queries, float32 or wider."""
        if self.weights is not None:
            return wide(self.weights[:, :, index])
        return self._logits(slice(None), slice(None), index, Scratch()).softmax(-1)

    def blocks(self, scratch: Scratch) -> Iterator[Block]:
        """All logits, in blocks of bounded size (see `BLOCK_BYTES`)."""
        b, g, n, m = self.shape
        row = 4 * m
        rows = min(n, max(LEAST_ROWS, BLOCK_BYTES // row))
        heads = min(g, max(1, BLOCK_BYTES // (row * n))) if rows == n else 1
        images = min(b, max(1, BLOCK_BYTES // (row * n * g))) if heads == g else 1
        for some_images in _slices(b, images):
            for some_heads in _slices(g, heads):
                for some_rows in _slices(n, rows):
                    logits = self._logits(some_images, some_heads, some_rows, scratch)
                    yield Block(some_images, some_heads, some_rows, logits)

    def _logits(
        self, images: slice, heads: slice, rows: slice | Tensor, scratch: Scratch
    ) -> Tensor:
        """scale · q kᵀ + mask for a part; a masked place gets a large negative number.

        A finite one keeps 0 · logit a number in the entropy.
        """
        if self.logits is not None:
            given = wide(self.logits[images, heads][:, :, rows])
            logits = scratch.take("logits", tuple(given.shape), given)
            return torch.clamp(given, min=_floor(given), out=logits)
        q, k = self._queries_keys()
        q, k = wide(q[images, heads][:, :, rows]) * self.scale, wide(k[images, heads])
        logits = scratch.take("logits", (*q.shape[:3], k.shape[2]), q)
        torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT, out=logits.flatten(0, 1))
        if self.mask is not None:
            logits += self.mask.expand(self.shape)[images, heads][:, :, rows]
        if self.causal:
            n, m = self.shape[2:]
            positions = torch.arange(n, device=q.device)[rows, None]
            logits.masked_fill_(torch.arange(m, device=q.device) > positions, -torch.inf)
        if self.mask is not None or self.causal:
            logits.clamp_(min=_floor(logits))
        return logits


def _floor(logits: Tensor) -> float:
    return torch.finfo(logits.dtype).min / 4


def wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 where it is that."""
    return x if x.dtype == torch.float64 else x.float()


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
