"""One call of an attention, as the model made it, and its weights a block at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Bytes of float32 scores in one block.
BLOCK_BYTES = 4 << 20


class Block(NamedTuple):
    """Weights of some images, heads and queries, with the logits they came from."""

    images: slice
    heads: slice
    rows: slice
    weights: Tensor
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
        return self._logits(slice(None), slice(None), index).softmax(-1)

    def blocks(self, limit: int = BLOCK_BYTES) -> Iterator[Block]:
        """All weights, in blocks whose scores take at most `limit` bytes (or one row)."""
        b, g, n, m = self.shape
        row = 4 * m
        rows = min(n, max(1, limit // row))
        heads = min(g, max(1, limit // (row * n))) if rows == n else 1
        images = min(b, max(1, limit // (row * n * g))) if heads == g else 1
        for some_images in _slices(b, images):
            for some_heads in _slices(g, heads):
                for some_rows in _slices(n, rows):
                    yield self._block(some_images, some_heads, some_rows)

    def _block(self, images: slice, heads: slice, rows: slice) -> Block:
        if self.weights is not None and self.logits is not None:
            weights = wide(self.weights[images, heads, rows])
            logits = wide(self.logits[images, heads, rows])
        else:
            logits = self._logits(images, heads, rows)
            weights = logits.softmax(-1)
        return Block(images, heads, rows, weights, logits)

    def _logits(self, images: slice, heads: slice, rows: slice | Tensor) -> Tensor:
        """scale · q kᵀ + mask for a part; a masked place gets a large negative number."""
        q, k = self._queries_keys()
        q, k = wide(q[images, heads][:, :, rows]), wide(k[images, heads])
        logits = torch.matmul(q, k.mT).mul_(self.scale)  # b g n d, b g m d -> b g n m
        if self.mask is not None:
            b, g, n, m = self.shape
            mask = self.mask.expand(b, g, n, m)[images, heads][:, :, rows]
            logits = logits + mask
        if self.causal:
            n, m = self.shape[2:]
            positions = torch.arange(n, device=q.device)[rows, None]
            later = torch.arange(m, device=q.device) > positions
            logits = logits.masked_fill(later, -torch.inf)
        if self.mask is not None or self.causal:
            # A finite floor keeps 0 · logit a number in the entropy.
            logits = logits.clamp_(min=torch.finfo(logits.dtype).min / 4)
        return logits


def wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 where it is that."""
    return x if x.dtype == torch.float64 else x.float()


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
