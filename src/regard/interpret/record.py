"""Refusals: models that cannot be read, and layers, kinds and queries that are not there."""

import contextlib
import fnmatch
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import InputError, nearest
from regard.interpret.attention_call import KINDS, Call, Scratch, reduce_call
from regard.interpret.function_mode import Watch
from regard.interpret.recording import Attention, Recording
from regard.interpret.tokens import Tokens
from regard.layers.checks import count, pair

# Classes, by name, whose weights are over shifted windows and no map of the image.
WINDOWED = ("ShiftedWindowAttention", "ShiftedWindowAttentionV2", "WindowAttention")


def check_readable(model: nn.Module) -> None:
    """Refuse a model whose attention cannot be seen from outside or is over windows."""
    if not isinstance(model, nn.Module):
        raise InputError(f"a {type(model).__name__} came; give the model itself, a torch.nn.Module")
    for name, module in model.named_modules():
        kind = type(module).__name__
        where = f"{name} ({kind})" if name else kind
        # By name: torch._dynamo takes a second to import where nothing is compiled.
        compiled = kind == "OptimizedModule"
        if compiled or getattr(module, "_compiled_call_impl", None) is not None:
            raise InputError(
                f"{where} is compiled, and what happens inside cannot be recorded; record the "
                "model you compiled, which has the same weights"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{where} is a TorchScript module, which cannot be recorded; give the model it "
                "was made from"
            )
        if kind in WINDOWED:
            raise InputError(
                f"{where} attends within shifted windows, so that its weights form no map of the "
                "image; it cannot be recorded. Record a model with global attention"
            )


def check_queries(queries: Any, kinds: Sequence[str]) -> list[int | tuple[int, int]] | None:
    """The chosen queries, or a refusal of what is no token index and no (row, column), and of
    queries where nothing that has rows of them is kept."""
    if queries is None:
        return None
    if not {"weights", "mean"} & set(kinds):
        raise InputError(
            "queries choose rows of 'weights' or 'mean', and keep has neither: "
            f"{', '.join(kinds)}; add one of them, or leave queries out"
        )
    needed = "give a list of token indices or of (row, column)"
    if isinstance(queries, (str, bytes)) or not isinstance(queries, Sequence) or not queries:
        raise InputError(f"queries={queries!r}: {needed}, with at least one of them")
    found: list[int | tuple[int, int]] = []
    for query in queries:
        numbers = query if isinstance(query, tuple) else (query,)
        try:
            whole = tuple(operator.index(number) for number in numbers)
        except TypeError:
            whole = ()
        if any(isinstance(number, bool) for number in numbers) or len(whole) != (
            2 if isinstance(query, tuple) else 1
        ):
            raise InputError(f"queries has {query!r}; {needed}")
        found.append((whole[0], whole[1]) if isinstance(query, tuple) else whole[0])
    return found


def check_grid(grid: tuple[int, int] | None, layouts: Iterable[Tokens]) -> None:
    """Refuse a grid given outright that no attention's tokens form."""
    layouts = list(layouts)
    if grid is None or not layouts or any(layout.grid is not None for layout in layouts):
        return
    counts = ", ".join(str(n) for n in dict.fromkeys(layout.count for layout in layouts))
    raise InputError(
        f"grid={grid} has {grid[0] * grid[1]} places, and attention is over {counts} tokens; give "
        "a grid of as many places, or of fewer where the others, which are then extra tokens, are "
        "no more than the places"
    )


def check_keep(keep: str | Sequence[str]) -> tuple[str, ...]:
    """The kinds to keep, or a refusal of an unknown one."""
    if not isinstance(keep, (str, list, tuple, set, frozenset)):
        raise InputError(f"keep={keep!r}: give some of {', '.join(KINDS)}")
    kinds = (keep,) if isinstance(keep, str) else tuple(keep)
    for kind in kinds:
        if kind not in KINDS:
            raise InputError(
                f"keep={kind!r} is unknown ({nearest(str(kind), KINDS)}); give some of "
                f"{', '.join(KINDS)}"
            )
    if not kinds:
        raise InputError(f"keep is empty; give some of {', '.join(KINDS)}")
    return kinds


class Layers:
    """Which layers are wanted: names (a parent's name or a pattern with * too), or positions.

    A position counts the attentions in the order they run, from the end if negative.
    """

    def __init__(self, wanted: Iterable[str | int] | str | int | None, model: nn.Module) -> None:
        if isinstance(wanted, (str, int)):
            wanted = [wanted]
        if isinstance(wanted, Mapping) or not (wanted is None or isinstance(wanted, Iterable)):
            raise InputError(f"layers={wanted!r}: give names, positions, or None for all")
        self.every = wanted is None
        items = list(wanted or [])
        self.patterns = [item for item in items if isinstance(item, str)]
        self.positions = [item for item in items if not isinstance(item, str)]
        if not self.every and not items:
            raise InputError("layers is empty; give names, positions, or None for all")
        for position in self.positions:
            if isinstance(position, bool) or not isinstance(position, int):
                raise InputError(f"layers has {position!r}; give names or integers")
        listed = model.named_modules() if self.patterns else ()
        names = [name or type(model).__name__ for name, _ in listed]
        for pattern in self.patterns:
            if not any(matches(name, pattern) for name in names):
                raise InputError(
                    f"{type(model).__name__} has no layer {pattern!r} ({nearest(pattern, names)})"
                )

    def now(self, name: str, position: int) -> bool:
        """Whether the attention that runs at `position` may be wanted, as far as can be known."""
        from_end = any(wanted < 0 for wanted in self.positions)
        named = any(matches(name, pattern) for pattern in self.patterns)
        return self.every or named or from_end or position in self.positions

    def select(self, names: Sequence[str], modules: Sequence[str]) -> set[str]:
        """The wanted ones of the attentions that ran, all of them known; absent ones refused.

        `names` are the attentions in order, `modules` the module of each.
        """
        if self.every:
            return set(names)
        chosen: set[str] = set()
        for pattern in self.patterns:
            found = [n for n, m in zip(names, modules, strict=True) if matches(m, pattern)]
            if not found:
                raise InputError(
                    f"layer {pattern!r} computed no attention that can be read; those seen: "
                    f"{', '.join(names)}"
                )
            chosen.update(found)
        for position in self.positions:
            if not -len(names) <= position < len(names):
                raise InputError(
                    f"layers has {position}, but {len(names)} attentions ran: give "
                    f"{-len(names)} to {len(names) - 1}"
                )
            chosen.add(names[position])
        return chosen


def matches(name: str, pattern: str) -> bool:
    """Whether a module's name is `pattern`, below it, or matched by it."""
    return name == pattern or name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)


# record: the attention weights of every attention in a model, on demand.


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
