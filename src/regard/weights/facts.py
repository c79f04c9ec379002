"""What goes into a conversion beside the tensors, and what comes out."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from torch import Tensor

from regard.errors import InputError, nearest
from regard.weights.layouts import BlockFacts

Rest = Literal["refuse", "keep", "drop"]


@dataclass(frozen=True)
class Facts:
    """What a state dict does not say of its model, and what to do with the rest of it."""

    num_heads: int | None = None
    "heads of every attention block"
    dim_head: int | None = None
    "channels of a head, where blocks differ in width (in place of num_heads)"
    num_groups: int | None = None
    "groups of the norm, where it is not the layout's 32"
    eps: float | None = None
    "what the norm adds to the variance; diffusers and edm must be told (VAEs 1e-6, U-Nets 1e-5)"
    image_size: tuple[int, int] | None = None
    "height and width that a SimpleViT was built for"
    patch_size: tuple[int, int] | None = None
    "height and width of a SimpleViT's patch; from channels, a square one, if not given"
    channels: int | None = None
    "image channels of a SimpleViT; from patch_size if not given"
    rest: Rest = "refuse"
    "keys that belong to no block: refuse, keep as they are, or drop"
    packed: bool = False
    "write one packed projection, where the target has both forms (monai)"
    allow_nan: bool = False
    "take weights that are NaN or infinite"


@dataclass(frozen=True)
class Conversion:
    """Converted weights and all that must travel with them."""

    source: str
    target: str
    tensors: dict[str, Tensor]
    blocks: dict[str, BlockFacts] = field(default_factory=dict)
    """pixel attention blocks by their prefix, "" or ending in a dot"""
    vits: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    """SimpleViTs by their prefix: their config, None where image_size was not given"""
    rest: tuple[str, ...] = ()
    """keys of the source that belong to no block"""


def make_facts(given: Mapping[str, Any]) -> Facts:
    """`Facts` from keywords, or a refusal of an unknown one."""
    known = [item.name for item in fields(Facts)]
    for name in given:
        if name not in known:
            raise InputError(f"convert takes no {name!r}; {nearest(name, known)}")
    facts = Facts(**given)
    if facts.rest not in get_args(Rest):
        raise InputError(f"rest={facts.rest!r}: give one of {', '.join(get_args(Rest))}")
    return facts
