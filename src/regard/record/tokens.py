"""Which tokens are places of a grid, and which are extra (class, registers)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn

from regard.errors import InputError

# More tokens than these beside a grid that was found are no class token and registers but another
# grid, unless the model says that it has so many.
MOST_EXTRA = 16

# Modules (by Python module) whose extra tokens stand after the grid; elsewhere they lead.
EXTRA_LAST = ("vit_pytorch.simple_vit_with_register_tokens",)


@dataclass(frozen=True)
class Tokens:
    """The layout of a token sequence: leading extra tokens, a row-major grid, trailing ones."""

    count: int
    grid: tuple[int, int] | None = None
    leading: int = 0

    @property
    def extra(self) -> int:
        """How many tokens are no place of the grid."""
        return 0 if self.grid is None else self.count - self.grid[0] * self.grid[1]

    def places(self) -> slice:
        """The tokens that are places of the grid, row-major; refused where no grid is known."""
        h, w = self.need_grid()
        return slice(self.leading, self.leading + h * w)

    def need_grid(self) -> tuple[int, int]:
        """The grid as (rows, columns), or a refusal."""
        if self.grid is None:
            raise InputError(
                f"nothing says which grid {self.count} tokens form; give record(…, grid=(h, w))"
            )
        return self.grid

    def index(self, query: int | tuple[int, int], layer: str) -> int:
        """The token meant by `query`: its index in the sequence, or (row, column) on the grid."""
        if isinstance(query, tuple):
            h, w = self.need_grid()
            row, column = query
            if not (0 <= row < h and 0 <= column < w):
                raise InputError(
                    f"query {query} is outside the {h}×{w} grid of {layer}; rows go from 0 to "
                    f"{h - 1}, columns from 0 to {w - 1}"
                )
            return self.leading + row * w + column
        if not 0 <= query < self.count:
            raise InputError(f"query {query} is none of the {self.count} tokens of {layer}")
        return query


def with_grid(count: int, grid: tuple[int, int], model: nn.Module) -> Tokens:
    """Lay `count` tokens on a grid that was found; without one if they are too few or too many."""
    stated = getattr(model, "num_prefix_tokens", 0)
    most = max(MOST_EXTRA, stated if isinstance(stated, int) else 0)
    return laid(count, grid, model, most)


def given_grid(count: int, grid: tuple[int, int], model: nn.Module) -> Tokens:
    """Lay `count` tokens on a grid given outright; without one if fewer than half are on it."""
    return laid(count, grid, model, grid[0] * grid[1])


def laid(count: int, grid: tuple[int, int], model: nn.Module, most: int) -> Tokens:
    """`count` tokens on a grid, where 0 to `most` are beside it."""
    extra = count - grid[0] * grid[1]
    if not 0 <= extra <= most:
        return Tokens(count)
    return Tokens(count, grid, 0 if type(model).__module__ in EXTRA_LAST else extra)


def find_layout(
    count: int,
    model: nn.Module,
    images: Tensor | None,
    enclosing: Sequence[tuple[int, int] | None],
    seen: Iterable[tuple[int, int]],
    most_tokens: int = 0,
) -> Tokens:
    """The layout of `count` tokens, from what was seen on the way to them.

    In this order: the map (h, w) given to the innermost enclosing module that has exactly
    `count` pixels; the latest feature map `seen` that has; the model's own `patch_size`; the
    latest feature map that leaves at most 16 extra tokens; the largest grid of square patches that
    divide the image and leave at most 16 extra, at most half as many as places. The last is a
    guess, made in training only where the model has no `patch_size` and no sequence before had
    more tokens than these (`most_tokens`): one that lost some, as by patch dropout, is no whole
    grid. A model's `num_prefix_tokens` must agree with the number of extra tokens. Where nothing
    fits the grid stays unknown.
    """
    if count == 1:
        return Tokens(count)  # one query that pools a grid, no grid of one place
    latest = list(seen)[::-1]
    for grid in [*reversed(enclosing), *latest]:
        if grid is not None and grid[0] * grid[1] == count:
            return Tokens(count, grid)
    stated = _patch_grid(model, images)
    whole = not model.training or (not stated and count >= most_tokens)
    guesses = _square_grids(count, images) if whole else ()
    for grid in chain(stated, latest, guesses):
        layout = with_grid(count, grid, model)
        expected = getattr(model, "num_prefix_tokens", layout.extra)
        if layout.grid is not None and expected == layout.extra:
            return layout
    return Tokens(count)


def _patch_grid(model: nn.Module, images: Tensor | None) -> list[tuple[int, int]]:
    """The image divided by the model's `patch_size`, where it has one that is plain numbers."""
    patch = getattr(model, "patch_size", None)
    sides = patch if isinstance(patch, (tuple, list)) else (patch, patch)
    if images is None or len(sides) != 2 or not all(type(side) is int for side in sides):
        return []
    return [(images.shape[-2] // sides[0], images.shape[-1] // sides[1])]


def _square_grids(count: int, images: Tensor | None) -> Iterator[tuple[int, int]]:
    """Grids of square patches that divide the image, with at most half as many extra tokens as
    places; the finest first.
    """
    if images is None:
        return
    height, width = images.shape[-2:]
    for side in range(1, min(height, width) + 1):
        h, w = height // side, width // side
        if height % side == width % side == 0 and h * w <= count <= 1.5 * h * w:
            yield h, w
