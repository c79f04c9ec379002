"""record: the attention weights of every attention in a model, on demand."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.errors import InputError, counted, nearest
from regard.layers.checks import count, pair
from regard.record.calls import Call
from regard.record.reductions import reduce_call
from regard.record.refuse import Layers, check_keep, check_queries, check_readable
from regard.record.scratch import Scratch
from regard.record.tokens import Tokens
from regard.record.watch import Watch

Query = int | tuple[int, int]


@dataclass(frozen=True)
class Attention:
    """What one attention attended to; b images, g heads, n queries, m keys.

    Of the tensors those are there that were asked for, float32 (float64 of a float64 model):
    weights (b, g, n, m), of the chosen `rows` only where queries were chosen; `mean` over heads
    (b, n, m), likewise; `received` by each key, mean over all queries (b, g, m); `entropy` of
    every query in nats (b, g, n); `largest_logit` (b, g). `queries` and `keys` say which tokens
    are places of which grid.
    """

    name: str
    heads: int
    queries: Tokens
    keys: Tokens
    rows: tuple[int, ...] | None = None
    weights: Tensor | None = None
    mean: Tensor | None = None
    received: Tensor | None = None
    entropy: Tensor | None = None
    largest_logit: Tensor | None = None

    def kept(self) -> dict[str, Tensor]:
        """The tensors that are there, by kind."""
        kinds = ("weights", "mean", "received", "entropy", "largest_logit")
        values = {kind: getattr(self, kind) for kind in kinds}
        return {kind: value for kind, value in values.items() if value is not None}

    def need(self, kind: str) -> Tensor:
        """The tensor of one kind, or a refusal that says what was kept instead."""
        value = self.kept().get(kind)
        if value is None:
            raise InputError(
                f"{self.name} was recorded without {kind!r} (kept: {', '.join(self.kept())}); "
                f"record with keep={kind!r}"
            )
        return value

    def map_of(self, values: Tensor) -> Tensor:
        """Values of keys (…, m) as maps (…, h, w), extra tokens left out."""
        return values[..., self.keys.places()].unflatten(-1, self.keys.need_grid())


class Recording(Mapping[str, Attention]):
    """Attention by module name, in the order it ran.

    A module that ran again has its name with "#2", "#3", … In a notebook it shows itself.
    """

    def __init__(self) -> None:
        self._attentions: dict[str, Attention] = {}
        #: Modules called attention that ran and could not be read.
        self.unread: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Attention:
        if name not in self._attentions:
            raise InputError(f"no attention {name!r} was recorded ({nearest(name, self)})")
        return self._attentions[name]

    def __contains__(self, name: object) -> bool:
        return name in self._attentions

    def __iter__(self) -> Iterator[str]:
        return iter(self._attentions)

    def __len__(self) -> int:
        return len(self._attentions)

    def layers(self) -> list[Attention]:
        """All attentions, in the order they ran."""
        return list(self._attentions.values())

    def __repr__(self) -> str:
        lines = [f"Recording of {counted(len(self), 'attention')}"]
        for attention in self.layers():
            grid = attention.keys.grid
            place = f"{grid[0]}×{grid[1]}" if grid else f"{attention.keys.count} tokens"
            extra = f" + {attention.keys.extra} extra" if attention.keys.extra else ""
            kept = ", ".join(f"{k} {tuple(v.shape)}" for k, v in attention.kept().items())
            lines.append(
                f"  {attention.name}: {counted(attention.heads, 'head')}, {place}{extra}; {kept}"
            )
        if self.unread:
            lines.append(f"  not read: {', '.join(self.unread)}")
        return "\n".join(lines)

    def _repr_png_(self) -> bytes | None:
        from regard.record.picture import recording_png

        return recording_png(self)

    def _repr_html_(self) -> str:
        from regard.record.picture import recording_html

        return recording_html(self)


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
    is the same to the bit. Weights are those before dropout. Nothing stays on the model.

    Args:
        model: any module whose attention is `regard.attend`,
            torch.nn.functional.scaled_dot_product_attention, a softmax multiplied with values,
            or torch.nn.MultiheadAttention.
        layers: names of modules (or parents, or patterns with *), or positions in the order
            attentions run, from the end if negative; None records all.
        queries: keep weights of these queries only: token indices, or (row, column) on the grid.
        keep: some of "weights", "mean" (over heads), "received", "entropy", "largest_logit"; see
            `Attention`. The last three never hold n × m numbers, nor does "weights" or "mean" of
            chosen queries.
        images: record the first so many of a batch only.
        grid: (rows, columns) of the tokens, where it cannot be found from the input.

    Yields:
        A `Recording`, filled as the model runs and complete when the block ends.

    Raises:
        InputError: on entering, for a model that cannot be read (compiled, scripted, shifted
            windows) or a layer it has not; on leaving, if nothing was seen.
    """
    check_readable(model)
    chosen = Layers(layers, model)
    kinds = check_keep(keep)
    if grid is not None:
        grid = pair(grid, "grid")
    if images is not None:
        images = count(images, "images")
    seen = Recording()
    recorder = _Recorder(seen, chosen, kinds, check_queries(queries), images)
    watch = Watch(model, recorder.receive, grid=grid)
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

    def receive(self, module: str, queries: Tokens, keys: Tokens, call: Call) -> None:
        name, again = module, 2
        while name in self.modules:
            name, again = f"{module}#{again}", again + 1
        position = len(self.modules)
        self.modules[name] = module
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
        if not {"weights", "mean"} & set(self.kinds):
            return {}
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
        for name in set(self.seen._attentions) - wanted:
            del self.seen._attentions[name]
        self.seen.unread = tuple(unread)


def _why_nothing(unread: list[str], windowed: list[str]) -> str:
    if windowed:
        return (
            f"{', '.join(windowed)} attends within windows, whose weights form no map of the image"
        )
    if unread:
        return (
            f"{', '.join(unread)} computes no scaled_dot_product_attention and no softmax that is "
            "multiplied with values"
        )
    return "it ran no attention. Record a model that has some"
