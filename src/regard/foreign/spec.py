"""The description of an attention module."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Shape = Literal["map", "flat", "tokens"]


@dataclass(frozen=True)
class Spec:
    """result = merge(softmax(scale · q kᵀ) v), with the layers of a module, by their paths in it.

    An input is a "map" (b, c, …), "tokens" (b, n, c), or told by its dimensions ("either").
    `norm` is applied first, to a map, to (b, c, n) ("flat") or to tokens; q, k and v are `qkv`,
    whose output channels run over `order`, or three layers, applied to what `project_on` says,
    and normed by `q_norm` and `k_norm` per head. The layers `out` follow, in order, then the
    residual and a division. `bypassed` are layers whose own call the computation leaves out.
    """

    library: str
    takes: Literal["map", "tokens", "either"]
    out: tuple[str, ...]
    num_heads: int
    scale: float
    qkv: tuple[str, ...]
    order: str = "qkv g d"
    norm: str | None = None
    norm_on: Shape = "tokens"
    project_on: Shape = "tokens"
    q_norm: str | None = None
    k_norm: str | None = None
    residual: bool = False
    divisor: float = 1.0
    bypassed: tuple[str, ...] = ()


class Left(NamedTuple):
    """An attention module that is known but not described, and why."""

    reason: str
