"""What goes into a conversion beside the tensors, and what comes out."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from regard._io import read_json, unwritable
from regard.convert.layouts import BlockFacts
from regard.errors import InputError, listing, nearest

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


# Refusals that conversions share.


# Vision transformers of other architectures, by a key that each has.
OTHER_VITS = {
    "timm": r"(.*\.)?blocks\.\d+\.attn\.qkv\.weight",
    "big_vision": r"(.*/)?MultiHeadDotProductAttention_0/query/kernel",
    "torchvision": r"(.*\.)?encoder_layer_\d+\.self_attention\.in_proj_weight",
    "transformers": r"(.*\.)?encoder\.layer\.\d+\.attention\.attention\.query\.weight",
}


def add_rest(
    converted: dict[str, Tensor],
    tensors: Mapping[str, Tensor],
    used: set[str],
    source: str,
    facts: Facts,
) -> tuple[str, ...]:
    """Deal with the keys of no block as `facts.rest` says; returns their names."""
    rest = tuple(sorted(set(tensors) - used))
    if rest and facts.rest == "refuse":
        raise InputError(
            f"unused keys, of no block of the layout {source}: {listing(rest)}; give rest='keep' "
            "(--rest keep) to carry them along unchanged, or 'drop' to leave them out"
        )
    clashing = sorted(set(rest) & converted.keys()) if facts.rest == "keep" else []
    if clashing:
        raise InputError(f"unused keys have names of the target: {listing(clashing)}")
    if facts.rest == "keep":
        kept = {key: tensors[key] for key in rest}
        check_writable(kept)
        converted.update(kept)
    return rest


def check_names(tensors: Mapping[Any, Any]) -> None:
    """Refuse what is no dictionary of tensors by name."""
    odd = [repr(key) for key, value in tensors.items() if not is_named_tensor(key, value)]
    if odd:
        raise InputError(
            f"the state dict holds no tensor by name under {listing(odd)}; leave them out, or give "
            "rest='drop' (--rest drop)"
        )


def is_named_tensor(key: Any, value: Any) -> bool:
    return isinstance(key, str) and isinstance(value, Tensor)


def check_writable(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that cannot be written: sparse, quantised, without values, ill named."""
    bad = unwritable(tensors)
    if bad:
        raise InputError(
            f"weights that safetensors cannot hold: {listing(bad)}; make them dense "
            "(tensor.to_dense(), tensor.dequantize()), or leave them out"
        )


def check_values(tensors: Mapping[str, Tensor], facts: Facts) -> None:
    """Refuse weights that are no dense real numbers, or not finite unless allowed."""
    check_writable(tensors)
    odd = [f"{key} {tensor.dtype}" for key, tensor in tensors.items() if not is_real(tensor)]
    if odd:
        raise InputError(f"weights are not real floating-point numbers: {listing(odd)}")
    if facts.allow_nan:
        return
    bad = [key for key, tensor in tensors.items() if not math.isfinite(total(tensor))]
    if bad:
        raise InputError(
            f"weights are NaN or infinite: {listing(bad)}; take another checkpoint, or give "
            "allow_nan=True (--allow-nan)"
        )


def is_real(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def total(tensor: Tensor) -> float:
    """NaN or infinite exactly if an element is, since 0·∞ is NaN."""
    return float((tensor * 0).sum())


def refuse_other_vits(tensors: Iterable[str]) -> None:
    """Say so where the weights are of a vision transformer that is not convertible."""
    keys = list(tensors)
    for library, pattern in OTHER_VITS.items():
        if any(re.fullmatch(pattern, key) for key in keys):
            raise InputError(
                f"these are weights of {library}'s ViT, another architecture than SimpleViT "
                "(biases, learned positions, another head): it is not converted. Load it in its "
                "own library; regard.accelerate speeds it up and regard.record shows its attention"
            )


# What the config.json beside a weights file says of the blocks in that file.


@dataclass(frozen=True)
class Beside:
    """Facts that need not be told: of each block by its prefix, and the groups of every norm."""

    blocks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    num_groups: int | None = None

    def complete(self, facts: Facts, prefix: str) -> Facts:
        """`facts`, and for those not given what is known of the block at `prefix`."""
        known = {"num_groups": self.num_groups, **self.blocks.get(prefix, {})}
        names = ["num_groups", "eps"] + ["num_heads"] * (facts.dim_head is None)
        found: dict[str, Any] = {n: known.get(n) for n in names if getattr(facts, n) is None}
        return dataclasses.replace(facts, **found)


def read_beside(weights: Path) -> Beside:
    """Of a folder or file: ours says all of each block; diffusers' `norm_num_groups` is taken.

    Its `attention_head_dim` is not: in some of its models that is the number of heads.
    """
    file = (weights if weights.is_dir() else weights.parent) / "config.json"
    config = read_json(file) if file.is_file() else None
    if not isinstance(config, dict):
        return Beside()
    models = config.get("models")
    if config.get("library") == "regard" and isinstance(models, dict):
        return Beside({name: facts for name, facts in models.items() if isinstance(facts, dict)})
    groups = config.get("norm_num_groups") if "_diffusers_version" in config else None
    return Beside(num_groups=groups if isinstance(groups, int) else None)
