"""The layout of vit-pytorch's SimpleViT with QK norm, and ours."""

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from regard.convert.request import Conversion, Facts, add_rest, check_values, refuse_other_vits
from regard.errors import InputError, listing
from regard.layers.checks import count, pair
from regard.models.simple_vit import SimpleViT

# Our key on the left, `vit_pytorch.simple_vit_with_qk_norm`'s on the right, {i} the block.
# The tensors are the same; positions are computed on both sides, never stored.
VIT_KEYS: dict[str, str] = {
    "embed.norm_in.weight": "to_patch_embedding.1.weight",
    "embed.norm_in.bias": "to_patch_embedding.1.bias",
    "embed.project.weight": "to_patch_embedding.2.weight",
    "embed.project.bias": "to_patch_embedding.2.bias",
    "embed.norm_out.weight": "to_patch_embedding.3.weight",
    "embed.norm_out.bias": "to_patch_embedding.3.bias",
    "blocks.{i}.attention.norm.weight": "transformer.layers.{i}.0.norm.weight",
    "blocks.{i}.attention.norm.bias": "transformer.layers.{i}.0.norm.bias",
    "blocks.{i}.attention.q_norm.gamma": "transformer.layers.{i}.0.q_norm.gamma",
    "blocks.{i}.attention.k_norm.gamma": "transformer.layers.{i}.0.k_norm.gamma",
    "blocks.{i}.attention.qkv.weight": "transformer.layers.{i}.0.to_qkv.weight",
    "blocks.{i}.attention.out.weight": "transformer.layers.{i}.0.to_out.weight",
    "blocks.{i}.mlp.norm.weight": "transformer.layers.{i}.1.net.0.weight",
    "blocks.{i}.mlp.norm.bias": "transformer.layers.{i}.1.net.0.bias",
    "blocks.{i}.mlp.up.weight": "transformer.layers.{i}.1.net.1.weight",
    "blocks.{i}.mlp.up.bias": "transformer.layers.{i}.1.net.1.bias",
    "blocks.{i}.mlp.down.weight": "transformer.layers.{i}.1.net.3.weight",
    "blocks.{i}.mlp.down.bias": "transformer.layers.{i}.1.net.3.bias",
    "norm.weight": "transformer.norm.weight",
    "norm.bias": "transformer.norm.bias",
    "features_norm.weight": "linear_head.weight",
    "features_norm.bias": "linear_head.bias",
}

# Weights from which a model's widths are read, with their axes.
WIDTHS = {
    "embed.project.weight": ("dim", "patch"),
    "blocks.{i}.mlp.up.weight": ("mlp_dim", "dim"),
    "blocks.{i}.attention.q_norm.gamma": ("heads", "1", "dim_head"),
    "norm.weight": ("dim",),
}

# The key by which a model of each layout is found, at any depth.
ANCHORS = {
    "regard": "blocks.{i}.attention.qkv.weight",
    "vit-pytorch-qk": "transformer.layers.{i}.0.to_qkv.weight",
}


def find_vits(tensors: Mapping[str, Tensor], layout: str) -> dict[str, int]:
    """Prefix ("" or ending in a dot) and depth of each SimpleViT of `layout` in a state dict."""
    anchor = re.escape(ANCHORS[layout]).replace(re.escape("{i}"), r"(?P<i>\d{1,9})")
    pattern = re.compile(rf"(?P<prefix>(?:.*\.)?){anchor}")
    depths: dict[str, int] = {}
    for key in tensors:
        found = pattern.fullmatch(key)
        if found:
            depth = int(found["i"]) + 1
            depths[found["prefix"]] = max(depth, depths.get(found["prefix"], 0))
    return depths


def vit_key_map(depth: int, *, to_ours: bool) -> dict[str, str]:
    """Every key of a SimpleViT with `depth` blocks: source to target."""
    pairs: dict[str, str] = {}
    for ours, theirs in VIT_KEYS.items():
        for i in range(depth) if "{i}" in ours else (0,):
            pair = ours.replace("{i}", str(i)), theirs.replace("{i}", str(i))
            pairs.update([pair[::-1] if to_ours else pair])
    return pairs


def convert_vits(
    tensors: Mapping[str, Tensor], source: str, target: str, facts: Facts
) -> Conversion:
    """Every SimpleViT of a state dict, between ours and vit-pytorch's."""
    if target not in ANCHORS:
        raise InputError(f"a SimpleViT cannot become {target!r}; its layouts: {', '.join(ANCHORS)}")
    found = find_vits(tensors, source)
    if not found:
        refuse_other_vits(tensors)
        anchor = ANCHORS[source].replace("{i}", "0")
        raise InputError(
            f"no SimpleViT of the layout {source} is in the weights: it has {anchor}, at any "
            f"depth; the weights hold {listing(tensors)}"
        )
    converted: dict[str, Tensor] = {}
    missing: list[str] = []
    used: set[str] = set()
    for prefix, depth in found.items():
        if depth > len(tensors):
            raise InputError(f"the weights name block {depth - 1} but have {len(tensors)} keys")
        for old, new in vit_key_map(depth, to_ours=target == "regard").items():
            if prefix + old in tensors:
                converted[prefix + new] = tensors[prefix + old]
                used.add(prefix + old)
            else:
                missing.append(prefix + old)
    if missing:
        raise InputError(
            f"the weights do not fit the layout {source}; missing: {listing(missing)}"
            f"; unused: {listing(set(tensors) - used)}"
            + ("; another kind of ViT" if any("q_norm" in key for key in missing) else "")
        )
    check_values({key: tensors[key] for key in used}, facts)
    ours = converted if target == "regard" else tensors
    for prefix, depth in found.items():
        check_shapes(ours, tensors, source, prefix, depth)
    rest = add_rest(converted, tensors, used, source, facts)
    configs = {prefix: vit_config(ours, prefix, depth, facts) for prefix, depth in found.items()}
    return Conversion(source, target, converted, vits=configs, rest=rest)


def check_shapes(
    ours: Mapping[str, Tensor], tensors: Mapping[str, Tensor], source: str, prefix: str, depth: int
) -> None:
    """Refuse tensors whose shapes are not those of the SimpleViT that its widths make."""
    widths: dict[str, Any] = vit_widths(ours, prefix, source) | {"depth": depth}
    values = ours[f"{prefix}embed.project.weight"].shape[1]
    one_pixel: dict[str, Any] = {"image_size": 1, "patch_size": 1, "channels": values}
    model = SimpleViT(num_classes=None, **one_pixel, **widths, device="meta").state_dict()
    misshapen = []
    for old, new in vit_key_map(depth, to_ours=source != "regard").items():
        came = tensors[prefix + old].shape
        wanted = model[new if source != "regard" else old].shape
        if came != wanted:
            misshapen.append(f"{prefix}{old} {tuple(came)} for {tuple(wanted)}")
    if misshapen:
        raise InputError(
            f"the weights do not fit the layout {source}; misshapen: {listing(misshapen)}"
        )


def vit_widths(ours: Mapping[str, Tensor], prefix: str, source: str) -> dict[str, int]:
    """dim, mlp_dim, heads and dim_head of a SimpleViT of ours, from its weights."""
    widths: dict[str, int] = {}
    misshapen = []
    for key, axes in WIDTHS.items():
        shape = tuple(ours[prefix + key.format(i=0)].shape)
        if len(shape) != len(axes) or 0 in shape:
            name = key if source == "regard" else VIT_KEYS[key]
            misshapen.append(f"{prefix}{name.format(i=0)} {shape} for ({', '.join(axes)})")
        widths |= zip(axes, shape, strict=False)
    if misshapen:
        raise InputError(
            f"the weights do not fit the layout {source}; misshapen: {listing(misshapen)}"
        )
    return {name: widths[name] for name in ("dim", "mlp_dim", "heads", "dim_head")}


def vit_config(
    tensors: Mapping[str, Tensor], prefix: str, depth: int, facts: Facts
) -> dict[str, Any] | None:
    """The arguments that rebuild a SimpleViT of ours from its weights; None without image_size.

    A patch's values are one axis in the weights, channels · height · width, so that channels or
    patch_size must be told; with channels alone the patch is taken to be square.
    """
    patch_size = None if facts.patch_size is None else pair(facts.patch_size, "patch_size")
    channels = None if facts.channels is None else count(facts.channels, "channels")
    if facts.image_size is None:
        return None
    image_size = pair(facts.image_size, "image_size")
    values = tensors[f"{prefix}embed.project.weight"].shape[1]
    if patch_size is None and channels is None:
        raise InputError(
            f"a patch of this SimpleViT holds {values} values, channels · height · width: give "
            "channels or patch_size"
        )
    if patch_size is None:
        side = math.isqrt(values // (channels or 1))
        patch_size = (side, side)
    if channels is None:
        channels = values // math.prod(patch_size)
    if channels * math.prod(patch_size) != values:
        raise InputError(
            f"a patch of this SimpleViT holds {values} values, not {channels} channels · "
            f"{patch_size[0]} · {patch_size[1]}: give channels and patch_size that multiply to it"
        )
    return {
        "image_size": list(image_size),
        "patch_size": list(patch_size),
        "channels": channels,
        "num_classes": None,
        "depth": depth,
        "qk_norm": "unit",
        **vit_widths(tensors, prefix, "regard"),
    }
