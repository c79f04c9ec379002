"""Names to models."""

import inspect
import re
from typing import Any, NamedTuple

from torch import nn

from regard.errors import InputError, nearest
from regard.models.pixel_resnet import PixelResNet
from regard.models.simple_vit import SimpleViT
from regard.models.timm import TimmModel


class ViTSize(NamedTuple):
    """Width, heads and depth; the MLP is four times the width, and heads share the width."""

    dim: int
    heads: int
    depth: int


class ResNetSize(NamedTuple):
    """Channels of each stage, and convolutions in each."""

    widths: tuple[int, ...]
    depth: int


VIT_SIZES = {
    "nano": ViTSize(64, 2, 4),
    "ti": ViTSize(192, 3, 12),
    "s": ViTSize(384, 6, 12),
    "b": ViTSize(768, 12, 12),
    "l": ViTSize(1024, 16, 24),
}
RESNET_SIZES = {
    "nano": ResNetSize((32, 128, 128), 2),
    "s": ResNetSize((64, 256, 256), 2),
    "m": ResNetSize((128, 384, 512), 3),
}
TIMM = "timm:"


def model_names() -> list[str]:
    """Names that `create` takes, with one patch size standing for all; timm's are not listed."""
    vits = [f"simple-vit-{size}/16" for size in VIT_SIZES]
    return vits + [f"pixel-resnet-{size}" for size in RESNET_SIZES]


def family(name: str) -> str:
    """What stands before the size: "simple-vit" of "simple-vit-s/16"; a timm name is its own."""
    return name if name.startswith(TIMM) else name.rpartition("-")[0]


def create(name: str, *, num_classes: int | None, **options: Any) -> nn.Module:
    """Build a model from its name, e.g. create("simple-vit-s/16", num_classes=10).

    - `simple-vit-SIZE/PATCH` takes nano, ti, s, b or l and any integer patch; `image_size` is 14
      patches unless given, which at patch 16 is 224.
    - `pixel-resnet-SIZE` takes nano, s or m; `image_size` is 32 unless given.
    - `timm:NAME` is any model of timm (extra `timm`); `image_size` is 224 unless given.

    Options are those of the class (`SimpleViT`, `PixelResNet`, `TimmModel`), such as `image_size`
    and `channels`, and override what the name says.
    """
    if not isinstance(name, str):
        raise InputError(f"the model is {name!r}; give a name, such as 'simple-vit-ti/4'")
    if name.startswith(TIMM):
        return TimmModel(name.removeprefix(TIMM), num_classes=num_classes, **options)
    vit = re.fullmatch(r"simple-vit-(?P<size>[a-z]+)/(?P<patch>[1-9]\d*)", name)
    if vit is not None and vit["size"] in VIT_SIZES:
        arguments = vit_arguments(VIT_SIZES[vit["size"]], int(vit["patch"]))
        return build(SimpleViT, name, num_classes, arguments, options)
    size = RESNET_SIZES.get(name.removeprefix("pixel-resnet-"))
    if name.startswith("pixel-resnet-") and size is not None:
        arguments = {"image_size": 32, **size._asdict()}
        return build(PixelResNet, name, num_classes, arguments, options)
    raise InputError(
        f"there is no model {name!r}; {nearest(name, model_names())}. The number after the slash "
        f"of a simple-vit is the patch size, any positive integer; {TIMM}NAME is a model of timm"
    )


def vit_arguments(size: ViTSize, patch: int) -> dict[str, Any]:
    """What the name of a SimpleViT says."""
    return {
        "image_size": 14 * patch,
        "patch_size": patch,
        "dim": size.dim,
        "heads": size.heads,
        "dim_head": size.dim // size.heads,
        "depth": size.depth,
        "mlp_dim": 4 * size.dim,
    }


def build(
    model: type[SimpleViT | PixelResNet],
    name: str,
    num_classes: int | None,
    arguments: dict[str, Any],
    options: dict[str, Any],
) -> nn.Module:
    """The model with `options` over `arguments`, or a refusal of an option that it lacks."""
    known = sorted(set(inspect.signature(model).parameters) - {"num_classes"})
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise InputError(f"{name} has no option {unknown[0]!r}; {nearest(unknown[0], known)}")
    return model(num_classes=num_classes, **{**arguments, **options})
