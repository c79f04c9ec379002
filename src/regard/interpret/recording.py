"""Pictures of a recording: PNG files without an imaging library, and what a notebook shows."""

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from regard._png import data_uri, paint, png
from regard.errors import InputError, counted, nearest
from regard.interpret.tokens import Tokens

# Pixels between tiles, and the side to which a tile is enlarged, at least.
GAP = 2
TILE = 56


def tile_size(rows: list[NDArray[np.floating]]) -> tuple[int, int]:
    """Height and width of every tile of a `sheet`."""
    h, w = (max(maps.shape[axis] for maps in rows) for axis in (1, 2))
    zoom = max(1, -(-TILE // max(h, w)))
    return zoom * h, zoom * w


def sheet(rows: list[NDArray[np.floating]]) -> NDArray[np.uint8]:
    """A row of tiles for each layer, from maps (g, h, w); each map on a scale from 0 of its own.

    Coarser maps are enlarged to the tiles of the finest.
    """
    tall, wide = tile_size(rows)
    widest = max(len(maps) for maps in rows)
    canvas = np.full(
        (len(rows) * (tall + GAP) - GAP, widest * (wide + GAP) - GAP, 3), 255, np.uint8
    )
    for i, maps in enumerate(rows):
        h, w = maps.shape[1:]
        down, across = np.arange(tall) * h // tall, np.arange(wide) * w // wide
        for j, values in enumerate(maps):
            top, left = i * (tall + GAP), j * (wide + GAP)
            canvas[top : top + tall, left : left + wide] = paint(values)[down][:, across]
    return canvas


def shown_maps(attention: "Attention") -> tuple[str, Tensor] | None:
    """What to show of one attention, in words and as maps (g, h, w) of the first image."""
    if attention.keys.grid is None or attention.queries.grid != attention.keys.grid:
        return None
    if attention.weights is not None:
        weights = attention.weights[0]
        if attention.rows is not None:
            return "from the first chosen query", attention.map_of(weights[:, 0])
        return "received, mean over queries", attention.map_of(weights.mean(1))
    if attention.received is not None:
        return "received, mean over queries", attention.map_of(attention.received[0])
    if attention.mean is not None:
        mean = attention.mean[0, :1] if attention.rows is not None else attention.mean.mean(1)[:1]
        return "mean over heads", attention.map_of(mean)
    if attention.entropy is not None:
        return "entropy of each query", attention.map_of(attention.entropy[0])
    return None


def recording_png(seen: "Recording") -> bytes | None:
    """A sheet of maps, a row for each layer and a column for each head; None without a map."""
    shown = [found for found in map(shown_maps, seen.layers()) if found is not None]
    if not shown:
        return None
    return png(sheet([maps.float().cpu().numpy() for _, maps in shown]))


def recording_html(seen: "Recording") -> str:
    """The sheet with its legend, or the recording in words."""
    picture = recording_png(seen)
    words = html.escape(repr(seen))
    if picture is None:
        return f"<pre>{words}</pre>"
    what = next(found[0] for found in map(shown_maps, seen.layers()) if found is not None)
    return (
        f'<figure style="margin:0"><img alt="attention maps" src="{data_uri(picture)}" '
        f'style="image-rendering:pixelated"><figcaption>First image, {what}; a row for each '
        f"layer, a column for each head, each map scaled to its own maximum.</figcaption>"
        f"<details><summary>{counted(len(seen), 'attention')}</summary><pre>{words}</pre>"
        "</details></figure>"
    )


# What a recording holds: the attention of each module, by name.


@dataclass(frozen=True)
class Attention:
    """What one attention attended to; b images, g heads, n queries, m keys.

    Of the tensors those are there that were asked for, float32 (float64 of a float64 model):
    weights (b, g, n, m), of the chosen `rows` only where queries were chosen; `mean` over heads
    (b, n, m), likewise; `received` by each key, mean over all queries (b, g, m); `entropy` of
    every query in nats (b, g, n); `largest_logit` (b, g), NaN where the model wrote over its logits
    before it used the weights. `queries` and `keys` say which tokens
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

        return recording_png(self)

    def _repr_html_(self) -> str:

        return recording_html(self)
