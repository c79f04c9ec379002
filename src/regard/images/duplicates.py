"""Pictures that occur twice: the same pixels, or nearly the same picture."""

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

# On CIFAR-10, 43,000 pairs of splits apart, nearly all above 0.98 show the same, and copies saved
# again as JPEG of quality 60, scaled by 1.5 or darkened by a tenth all lie above it.
SIMILARITY = 0.98
BRIGHTNESS = 24.0  # grey levels by which the means of near duplicates may differ
_FLOOR = 1.0  # grey levels: contrast no larger counts as noise
_ROWS = 1024  # rows compared at a time


class Pair(NamedTuple):
    """Position i of one split, j of another; `similarity` is 1 for the same pixels."""

    i: int
    j: int
    similarity: float


def same(digests: list[str]) -> list[list[int]]:
    """Groups of positions with equal digests, of two or more."""
    groups: dict[str, list[int]] = defaultdict(list)
    for position, digest in enumerate(digests):
        groups[digest].append(position)
    return [group for group in groups.values() if len(group) > 1]


def describe(thumbs: Tensor) -> tuple[Tensor, Tensor]:
    """Thumbnails (n, d) in 0..255 to unit-contrast descriptors (n, d) and mean levels (n,).

    x = (t - mean t) / sqrt(sum (t - mean t)² + d · 1²), so that x · y is the correlation of two
    thumbnails, drawn towards 0 where contrast is no more than noise.
    """
    values = thumbs.to(torch.float32)
    level = values.mean(1)
    centred = values - level[:, None]
    energy = centred.square().sum(1, keepdim=True) + values.shape[1] * _FLOOR**2
    return centred / energy.sqrt(), level


def near(queries: Tensor, corpus: Tensor) -> list[Pair]:
    """For each query thumbnail its most similar one in the corpus, where that is close enough.

    Every query is compared with all of the corpus: exact, and for thumbnails far cheaper than
    the decoding that made them.
    """
    pairs = []
    (x, x_level), (y, y_level) = describe(queries), describe(corpus)
    for start in range(0, len(x), _ROWS):
        rows = slice(start, start + _ROWS)
        score = x[rows] @ y.T
        score.masked_fill_((x_level[rows, None] - y_level).abs() > BRIGHTNESS, -1.0)
        best, where = score.max(1)
        for row in torch.nonzero(best >= SIMILARITY).flatten().tolist():
            pairs.append(Pair(start + row, int(where[row]), float(best[row])))
    return pairs
