"""The layout of vit-pytorch's SimpleViT with QK norm, and ours."""

import re
from collections.abc import Mapping

from torch import Tensor

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

# The key by which a model of each layout is found, at any depth.
ANCHORS = {
    "regard": "blocks.{i}.attention.qkv.weight",
    "vit-pytorch-qk": "transformer.layers.{i}.0.to_qkv.weight",
}


def find_vits(tensors: Mapping[str, Tensor], layout: str) -> dict[str, int]:
    """Prefix ("" or ending in a dot) and depth of each SimpleViT of `layout` in a state dict."""
    anchor = re.escape(ANCHORS[layout]).replace(re.escape("{i}"), r"(?P<i>\d+)")
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
