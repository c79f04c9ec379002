"""Maps of attention: pure functions on recorded weights.

b images, g heads, n queries, m keys; a map is (…, h, w), row-major, extra tokens left out.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.data.preprocess import Geometry
from regard.errors import InputError
from regard.interpret.attention_call import entropy
from regard.interpret.recording import Attention
from regard.interpret.tokens import Tokens

__all__ = [
    "attention_distance",
    "attention_from",
    "attention_received",
    "cell_at",
    "cell_in_picture",
    "effective_keys",
    "entropy",
    "relevance",
    "rollout",
]


def attention_from(attention: Attention, cell: tuple[int, int]) -> Tensor:
    """Where the query at `cell` (row, column) looks, of each head: (b, g, h, w).

    The weights of a query sum to 1 over all keys; what is missing on the map is on extra tokens.
    """
    weights = attention.need("weights")
    token = attention.queries.index(cell, attention.name)
    if attention.rows is None:
        return attention.map_of(weights[:, :, token])
    if token not in attention.rows:
        raise InputError(
            f"the query {cell} of {attention.name} was not recorded; add it to record(queries=…)"
        )
    return attention.map_of(weights[:, :, attention.rows.index(token)])


def attention_received(attention: Attention) -> Tensor:
    """What each place receives, the mean over all queries, of each head: (b, g, h, w)."""
    if attention.received is not None:
        return attention.map_of(attention.received)
    weights = attention.need("weights")
    if attention.rows is not None:
        raise InputError(
            f"{attention.name} was recorded for chosen queries only; what is received needs all: "
            'record with keep="received"'
        )
    return attention.map_of(weights.mean(-2))


def rollout(layers: Sequence[Tensor], residual: float = 0.5) -> Tensor:
    """How much of each input token reaches each output token, through all layers: (b, n, n).

    R = Ã_L ⋯ Ã_1 with Ã = residual · I + (1 - residual) · A, A the mean over heads of weights
    (b, g, n, n) (or means (b, n, n), as recorded by keep="mean"). Rows sum to 1.

    Source: Abnar, Zuidema 2020, arXiv 2005.00928, where residual is 0.5.
    """
    if not 0 <= residual <= 1:
        raise InputError(f"residual={residual}: give a number from 0 to 1")
    reached: Tensor | None = None
    for mean in _square(layers):
        reached = (
            residual * _identity(mean) + (1 - residual) * mean
            if reached is None
            else residual * reached + (1 - residual) * (mean @ reached)
        )
    assert reached is not None
    return reached


def relevance(layers: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """R (b, n, n) from weights and the gradients of a class logit with respect to them.

    R = (I + Ā_L) ⋯ (I + Ā_1), Ā = mean over heads of max(0, G ⊙ A), both (b, g, n, n).
    `regard.class_relevance` gives the row that a classifier reads, without n × n matrices.

    Source: Chefer, Gur, Wolf 2021, arXiv 2103.15679.
    """
    if len(layers) != len(gradients):
        raise InputError(f"{len(layers)} layers and {len(gradients)} gradients; give one for each")
    weighted = [
        (weights * gradient).clamp(min=0).mean(1)
        for weights, gradient in zip(layers, gradients, strict=True)
    ]
    reached: Tensor | None = None
    for mean in _square(weighted):
        start = _identity(mean) if reached is None else reached
        reached = start + mean @ start
    assert reached is not None
    return reached


def effective_keys(weights: Tensor) -> Tensor:
    """exp(entropy): over how many keys a query (…, n) spreads, from 1 to m."""
    return entropy(weights).exp()


def attention_distance(weights: Tensor, tokens: Tokens, patch: tuple[float, float]) -> Tensor:
    """How far a head looks on average, in pixels: (b, g), from weights (b, g, n, n).

    The mean over the grid's queries i of Σ_j A_ij ‖x_i - x_j‖ / Σ_j A_ij, keys j on the grid, x
    the centres of patches `patch` = (height, width) pixels in size. Extra tokens have no place
    and are left out. Computed a row of the grid at a time.

    Source: Dosovitskiy et al. 2021, arXiv 2010.11929, section 4.5.
    """
    h, w = tokens.need_grid()
    places = tokens.places()
    if weights.shape[-2:] != (tokens.count, tokens.count):
        raise InputError(
            f"weights have shape {tuple(weights.shape)}; (…, {tokens.count}, {tokens.count}) "
            "with all queries is needed"
        )
    on_grid = weights[..., places, places]
    rows = torch.arange(h, device=weights.device, dtype=weights.dtype) * patch[0]
    columns = torch.arange(w, device=weights.device, dtype=weights.dtype) * patch[1]
    centres = torch.cartesian_prod(rows, columns).view(h * w, 2)
    total = weights.new_zeros(weights.shape[:2])
    for start in range(0, h * w, w):
        part = on_grid[..., start : start + w, :]
        distance = torch.cdist(
            centres[start : start + w], centres, compute_mode="donot_use_mm_for_euclid_dist"
        )
        total += ((part * distance).sum(-1) / part.sum(-1)).sum(-1)
    return total / (h * w)


def cell_at(
    place: tuple[float, float], geometry: Geometry, size: tuple[int, int], grid: tuple[int, int]
) -> tuple[int, int]:
    """The cell (row, column) of `grid` at a place (y, x) of the original picture.

    `geometry` says how the picture became an input of `size`; a place outside the input, such as
    one that was cropped away, is refused.
    """
    y, x = geometry.to_input(torch.tensor(place, dtype=torch.float64)).tolist()
    if not (0 <= y < size[0] and 0 <= x < size[1]):
        corners = torch.tensor([(0, 0), size], dtype=torch.float64)
        (top, left), (bottom, right) = geometry.to_picture(corners).tolist()
        raise InputError(
            f"the place x={place[1]:g}, y={place[0]:g} is outside what the model saw of the "
            f"picture: x from {left:g} to below {right:g}, y from {top:g} to below {bottom:g}"
        )
    return int(y * grid[0] / size[0]), int(x * grid[1] / size[1])


def cell_in_picture(
    cell: tuple[int, int], geometry: Geometry, size: tuple[int, int], grid: tuple[int, int]
) -> tuple[float, float, float, float]:
    """The part of the original picture under a cell: top, left, bottom, right, in its pixels."""
    step = torch.tensor([size[0] / grid[0], size[1] / grid[1]], dtype=torch.float64)
    corners = torch.tensor([cell, (cell[0] + 1, cell[1] + 1)], dtype=torch.float64) * step
    (top, left), (bottom, right) = geometry.to_picture(corners).tolist()
    return top, left, bottom, right


def _square(layers: Sequence[Tensor]) -> list[Tensor]:
    """Means over heads (b, n, n), or a refusal."""
    if not layers:
        raise InputError("no layers came; give the weights of at least one")
    means = [weights.mean(1) if weights.ndim == 4 else weights for weights in layers]
    for mean in means:
        if mean.shape != means[0].shape or mean.shape[-1] != mean.shape[-2]:
            shapes = sorted({tuple(weights.shape) for weights in layers})
            raise InputError(
                f"the layers' weights have the shapes {shapes}; a product over layers needs all "
                "queries and keys, as many, in every layer"
            )
    return means


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device).expand_as(like)
