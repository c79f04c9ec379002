"""record: the attention weights of every attention in a model, on demand."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.layers.checks import count, pair
from regard.record.calls import Call
from regard.record.recording import Attention, Recording
from regard.record.reductions import reduce_call
from regard.record.refuse import Layers, check_grid, check_keep, check_queries, check_readable
from regard.record.scratch import Scratch
from regard.record.tokens import Tokens
from regard.record.watch import Watch

Query = int | tuple[int, int]


@contextlib.contextmanager
def record(
    model: nn.Module,
    *,
    layers: Iterable[str | int] | str | int | None = None,
    queries: Sequence[Query] | None = None,
    keep: str | Sequence[str] = "weights",
    images: int | None = None,
    grid: tuple[int, int] | None = None,
) -> Iterator[Recording]:
    """Record what every attention of `model` attends to while the block runs.

        with regard.record(model) as seen:
            model(x)
        seen["blocks.0.attention"].weights  # (b, g, n, n)

    Weights are softmax(s q kᵀ + mask) in float32 of the very queries, keys, scale and mask that
    the module used, computed beside it: fused kernels keep running, and what the model returns
    is the same to the bit. Weights are those before dropout, also where it works in place. A query
    that a mask bars from every key has what the module gives it: zeros from most fused kernels, NaN
    from a softmax. Nothing stays on the model.

    Args:
        model: any module whose attention is `regard.attend`,
            torch.nn.functional.scaled_dot_product_attention, a softmax multiplied with values,
            or torch.nn.MultiheadAttention.
        layers: names of modules (or parents, or patterns with *), or positions in the order
            attentions run, from the end if negative; None records all.
        queries: keep weights, or their mean over heads, of these queries only: token indices, or
            (row, column) on the grid.
        keep: some of "weights", "mean" (over heads), "received", "entropy", "largest_logit"; see
            `Attention`. The last three never hold n × m numbers, nor does "weights" or "mean" of
            chosen queries.
        images: record the first so many of a batch only.
        grid: (rows, columns) of the tokens, where it cannot be found from the input.

    Yields:
        A `Recording`, filled as the model runs and complete when the block ends.

    Raises:
        InputError: on entering, for a model that cannot be read (compiled, scripted, shifted
            windows) or a layer it has not; on leaving, if nothing was seen, a wanted layer cannot
            be read, or no attention is over the given grid.
    """
    check_readable(model)
    chosen = Layers(layers, model)
    kinds = check_keep(keep)
    if grid is not None:
        grid = pair(grid, "grid")
    if images is not None:
        images = count(images, "images")
    seen = Recording()
    recorder = _Recorder(seen, chosen, kinds, check_queries(queries, kinds), images)
    watch = Watch(model, recorder.receive, recorder.refuse, grid=grid)
    with watch:
        yield seen
    recorder.finish(watch)


class _Recorder:
    """Fills a recording from the calls that a watch sees."""

    def __init__(
        self,
        seen: Recording,
        layers: Layers,
        kinds: tuple[str, ...],
        queries: Sequence[Query] | None,
        images: int | None,
    ) -> None:
        self.seen = seen
        self.layers = layers
        self.kinds = kinds
        self.queries = queries
        self.images = images
        self.modules: dict[str, str] = {}  # attention to module, all that ran
        self.refused: dict[str, InputError] = {}

    def _named(self, module: str) -> str:
        """A new name for an attention that ran in a module."""
        name, again = module, 2
        while name in self.modules:
            name, again = f"{module}#{again}", again + 1
        self.modules[name] = module
        return name

    def refuse(self, module: str, error: InputError) -> None:
        """Note that an attention cannot be read, to be said when it turns out to be wanted."""
        self.refused[self._named(module)] = error

    def receive(self, module: str, queries: Tokens, keys: Tokens, call: Call) -> None:
        position = len(self.modules)
        name = self._named(module)
        if not self.layers.now(module, position):
            return
        if self.images is not None:
            call = call.first(self.images)
        kept: dict[str, Tensor] = {}
        rows = None
        kinds = set(self.kinds)
        if self.queries is not None:
            rows = tuple(queries.index(query, name) for query in self.queries)
            kept = self._chosen_rows(call, rows)
            kinds -= {"weights", "mean"}
        if kinds:
            kept |= reduce_call(call, kinds, Scratch())
        heads = call.shape[1]
        self.seen._attentions[name] = Attention(name, heads, queries, keys, rows, **kept)

    def _chosen_rows(self, call: Call, rows: tuple[int, ...]) -> dict[str, Tensor]:
        weights = call.rows(torch.tensor(rows, device=call.v.device))
        kept = {"weights": weights, "mean": weights.mean(1)}
        return {kind: kept[kind] for kind in ("weights", "mean") if kind in self.kinds}

    def finish(self, watch: Watch) -> None:
        """Drop what was not wanted after all; refuse an empty result."""
        model = type(watch.model).__name__
        if not watch.called:
            raise InputError(f"nothing was recorded: {model} was not called inside the with block")
        read = list(self.modules.values())
        unread = [
            name
            for name in watch.attention_like
            if not (read and name == model)
            and not any(m == name or m.startswith(f"{name}.") for m in read)
            and not any(name.startswith(f"{m}.") for m in read)
        ]
        if not self.modules:
            raise InputError(
                f"no attention could be read in {model}: "
                + _why_nothing(unread, sorted(watch.windowed))
            )
        wanted = self.layers.select(list(self.modules), read)
        for name, error in self.refused.items():
            if name in wanted:
                raise error
        for name in set(self.seen._attentions) - wanted:
            del self.seen._attentions[name]
        layouts = [layout for a in self.seen.layers() for layout in (a.queries, a.keys)]
        check_grid(watch.places.grid, layouts)
        self.seen.unread = tuple(unread)


def _why_nothing(unread: list[str], windowed: list[str]) -> str:
    if windowed:
        return (
            f"{', '.join(windowed)} attends within windows, whose weights form no map of the "
            "image, or over tokens of which nothing says that they are all of an image; in the "
            "second case give record(…, grid=(h, w))"
        )
    if unread:
        return (
            f"{', '.join(unread)} computes no scaled_dot_product_attention and no softmax that is "
            "multiplied with values"
        )
    return "it ran no attention. Record a model that has some"
