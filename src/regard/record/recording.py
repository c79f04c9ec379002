"""What a recording holds: the attention of each module, by name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from regard.errors import InputError, counted, nearest
from regard.record.tokens import Tokens


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
        from regard.record.picture import recording_png

        return recording_png(self)

    def _repr_html_(self) -> str:
        from regard.record.picture import recording_html

        return recording_html(self)
