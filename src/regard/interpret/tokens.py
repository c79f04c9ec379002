"""Which tokens are places of a grid, and which are extra (class, registers)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

from regard.errors import InputError
from regard.interpret.attention_call import Call

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


# What the maps and sequences that modules pass on tell of an image's tokens.


Size = tuple[int, int]


class Places:
    """Notes sizes while a model runs, and lays tokens out by them."""

    def __init__(self, model: nn.Module, grid: Size | None) -> None:
        self.model = model
        self.grid = grid
        #: The images that the model was given, and how many; None where it was given something else
        self.images: Tensor | None = None
        self.batch: int | None = None
        self._maps: dict[Size, None] = {}
        self._counts: set[int] = set()  # of tokens or pixels of an image
        self._batches: set[int] = set()  # sizes of other batches of sequences than of the images
        self._most_tokens = 0
        self._layouts: dict[Any, Tokens] = {}

    def start(self, first: Tensor | None) -> None:
        """Forget the last call of the model: it was given `first`."""
        self._maps.clear()
        self._counts.clear()
        self._batches.clear()
        self._most_tokens = 0
        self._layouts.clear()
        self.images = as_map(first)
        self.batch = None if first is None else first.shape[0]

    def given(self, first: Tensor | None) -> Size | None:
        """Note what a module was given; the size, where that is a map."""
        given_map = as_map(first)
        if given_map is not None and self._more_pictures(given_map):
            self.images, self.batch = given_map, given_map.shape[0]
        if first is not None:
            self.note(first)
        return None if given_map is None else map_size(given_map)

    def _more_pictures(self, given: Tensor) -> bool:
        """Whether the model made other views of the pictures (such as mirrored) beside them."""
        before = self.images
        return before is not None and given.shape[1:] == before.shape[1:] and given is not before

    def returned(self, module: nn.Module, output: Any) -> None:
        """Note what a module returned."""
        if not isinstance(output, Tensor):
            return
        self.note(output)
        if output.ndim != 4:
            return
        size = map_size(output)
        self._maps.pop(size, None)
        self._maps[size] = None  # the latest last
        # Patches that a convolution makes are a sequence too, whatever flattens them.
        full = self.images is not None and map_size(self.images) == size
        if isinstance(module, nn.Conv2d) and not full:
            self._most_tokens = max(self._most_tokens, size[0] * size[1])

    def note(self, x: Tensor) -> None:
        """Note the sizes of a sequence (b, n, c), or of a map."""
        if x.ndim == 3 and x.shape[0] != self.batch:
            self._batches.add(x.shape[0])
        elif x.ndim == 3:
            self._counts.add(x.shape[1])
            self._most_tokens = max(self._most_tokens, x.shape[1])
        elif x.ndim == 4 and x.shape[0] == self.batch:
            self._counts.add(x.shape[2] * x.shape[3])

    def layout(self, count: int, enclosing: Sequence[Size | None]) -> Tokens:
        """The layout of `count` tokens, within modules that were given `enclosing` maps."""
        if self.grid is not None:
            return given_grid(count, self.grid, self.model)
        key = count, tuple(enclosing), tuple(self._maps), self._most_tokens
        if key not in self._layouts:
            self._layouts[key] = find_layout(
                count, self.model, self.images, enclosing, self._maps, self._most_tokens
            )
        return self._layouts[key]

    def of_images(self, call: Call) -> Call | None:
        """The call with heads that were merged into the batch taken apart; None for a softmax that
        is no attention over the images' tokens.
        """
        if call.merged and self.batch is not None:
            whole = call.shape[0] % self.batch == 0
            if whole and (call.q is None or self._are_heads(call)):
                return call.apart(self.batch)
            if call.q is None:
                return None
        return call

    def _are_heads(self, call: Call) -> bool:
        """Whether heads are merged into the batch, not windows or views: queries are all of an
        image, and no module was given sequences in such a batch.
        """
        b, _, n, _ = call.shape
        return b == self.batch or (n in self._counts and b not in self._batches)


def as_map(x: Tensor | None) -> Tensor | None:
    """x if it is a map (b, c, h, w)."""
    return x if x is not None and x.ndim == 4 else None


def map_size(x: Tensor) -> Size:
    """(rows, columns) of a map (b, c, h, w)."""
    return x.shape[-2], x.shape[-1]
