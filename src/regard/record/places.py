"""What the maps and sequences that modules pass on tell of an image's tokens."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from regard.record.calls import Call
from regard.record.tokens import Tokens, find_layout, given_grid

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
