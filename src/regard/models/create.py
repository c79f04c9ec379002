"""Names to models."""

import inspect
import re
from typing import Any, NamedTuple

from torch import nn

from regard.errors import InputError, nearest
from regard.models.simple_vit import SimpleViT

VIT_OPTIONS = set(inspect.signature(SimpleViT).parameters) - {"num_classes"}


class ViTSize(NamedTuple):
    """Width, heads and depth; the MLP is four times the width, and heads share the width."""

    dim: int
    heads: int
    depth: int


VIT_SIZES = {
    "nano": ViTSize(64, 2, 4),
    "ti": ViTSize(192, 3, 12),
    "s": ViTSize(384, 6, 12),
    "b": ViTSize(768, 12, 12),
    "l": ViTSize(1024, 16, 24),
}


def model_names() -> list[str]:
    """Names that `create` takes, with one patch size standing for all."""
    return [f"simple-vit-{size}/16" for size in VIT_SIZES]


def create(name: str, *, num_classes: int | None, **options: Any) -> nn.Module:
    """Build a model from its name, e.g. create("simple-vit-s/16", num_classes=10).

    `simple-vit-SIZE/PATCH` takes nano, ti, s, b or l and any integer patch. Options are those of
    the class (`image_size`, `channels`, `qk_norm`, …) and override what the name says;
    `image_size` is 14 patches unless given, which at patch 16 is 224.
    """
    match = re.fullmatch(r"simple-vit-(?P<size>[a-z]+)/(?P<patch>[1-9]\d*)", name)
    if match is None or match["size"] not in VIT_SIZES:
        raise InputError(
            f"there is no model {name!r}; {nearest(name, model_names())}. "
            "The number after the slash is the patch size, any positive integer"
        )
    size, patch = VIT_SIZES[match["size"]], int(match["patch"])
    arguments: dict[str, Any] = {
        "image_size": 14 * patch,
        "patch_size": patch,
        "dim": size.dim,
        "heads": size.heads,
        "dim_head": size.dim // size.heads,
        "depth": size.depth,
        "mlp_dim": 4 * size.dim,
    }
    unknown = sorted(set(options) - VIT_OPTIONS)
    if unknown:
        raise InputError(
            f"{name} has no option {unknown[0]!r}; {nearest(unknown[0], sorted(VIT_OPTIONS))}"
        )
    return SimpleViT(num_classes=num_classes, **{**arguments, **options})
