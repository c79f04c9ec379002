"""Pixel attention blocks within a state dict: found, checked, read and written."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from regard.layers.pixel_attention import PixelParams
from regard.weights.layouts import BlockFacts, PixelLayout, forms, key_map, names


def find_blocks(keys: Iterable[str], layout: PixelLayout) -> dict[str, set[str]]:
    """Prefix of each block to the layout's keys it has; part of a norm and of q, k or v is a block.

    Whole dotted names match: "to_q.weight" is in "mid.to_q.weight" and not in "auto_q.weight".
    """
    maps = [key_map(layout, packed) for packed in forms(layout)]
    roles = {key: role for keys_of in maps for (role, _), key in keys_of.items()}
    held: dict[str, set[str]] = {}
    for whole in keys:
        parts = whole.split(".")
        for start in range(len(parts)):
            local = ".".join(parts[start:])
            if local in roles:
                held.setdefault(whole[: len(whole) - len(local)], set()).add(local)
    return {
        prefix: found
        for prefix, found in held.items()
        if {"norm"} & {roles[key] for key in found}
        and {"q", "k", "v", "qkv"} & {roles[key] for key in found}
    }


def is_packed(layout: PixelLayout, held: set[str]) -> bool:
    """Whether a block holds one packed projection."""
    return layout.packed is not None and any(
        key_map(layout, True)["qkv", kind] in held for kind in ("weight", "bias")
    )


def missing_keys(layout: PixelLayout, held: set[str]) -> list[str]:
    """Keys that a block needs and lacks."""
    expected = key_map(layout, is_packed(layout, held))
    return [
        key
        for (role, kind), key in expected.items()
        if key not in held and not (kind == "bias" and role in layout.bias_optional)
    ]


def strange_keys(layout: PixelLayout, packed: bool, prefix: str, keys: Iterable[str]) -> list[str]:
    """Keys that stand inside a block's own parts, or beside them, and mean something else."""
    expected = {prefix + key for key in key_map(layout, packed).values()}
    own = {name.split(".")[0] for form in forms(layout) for name in names(layout, form).values()}
    inside = tuple(f"{prefix}{name}." for name in sorted(own | set(layout.beside)))
    return sorted(key for key in keys if key.startswith(inside) and key not in expected)


def shapes(layout: PixelLayout, packed: bool, channels: int) -> dict[str, tuple[int, ...]]:
    """The shape of each key within a block."""
    sizes: dict[str, tuple[int, ...]] = {}
    for (role, kind), key in key_map(layout, packed).items():
        rows = 3 * channels if role == "qkv" else channels
        matrix = kind == "weight" and role != "norm"
        sizes[key] = (rows, channels, *(1,) * layout.ones) if matrix else (rows,)
    return sizes


def read_block(layout: PixelLayout, block: Mapping[str, Tensor], num_heads: int) -> PixelParams:
    """The ten parameters of a complete block, given by its keys within the block."""
    packed = is_packed(layout, set(block))
    keys = key_map(layout, packed)

    def get(role: str, kind: str) -> Tensor:
        tensor = block.get(keys[role, kind])
        if tensor is None:  # an optional bias
            return torch.zeros_like(block[keys["norm", "bias"]])
        return tensor.flatten(1) if tensor.ndim > 1 else tensor

    def projections(kind: str) -> list[Tensor]:
        if packed:
            return unpack(get("qkv", kind), layout.order, num_heads)
        return [get(role, kind) for role in ("q", "k", "v")]

    (q, k, v), (q_bias, k_bias, v_bias) = projections("weight"), projections("bias")
    return PixelParams(
        *(get("norm", "weight"), get("norm", "bias")),
        *(q, q_bias, k, k_bias, v, v_bias),
        *(get("out", "weight"), get("out", "bias")),
    )


def write_block(
    layout: PixelLayout, params: PixelParams, facts: BlockFacts, *, packed: bool
) -> dict[str, Tensor]:
    """The ten parameters under a layout's keys within a block, in its shapes."""
    parts = {"norm": (params.norm_weight, params.norm_bias)}
    parts["out"] = params.out_weight, params.out_bias
    parts["q"] = params.q_weight, params.q_bias
    parts["k"] = params.k_weight, params.k_bias
    parts["v"] = params.v_weight, params.v_bias
    if packed:
        weights, biases = zip(parts.pop("q"), parts.pop("k"), parts.pop("v"), strict=True)
        parts["qkv"] = (
            pack(weights, layout.order, facts.num_heads),
            pack(biases, layout.order, facts.num_heads),
        )
    keys = key_map(layout, packed)
    sizes = shapes(layout, packed, facts.channels)
    return {
        keys[role, kind]: tensor.reshape(sizes[keys[role, kind]])
        for role, pair in parts.items()
        for kind, tensor in zip(("weight", "bias"), pair, strict=True)
    }


PLAIN_ORDER = "qkv g d"


def unpack(packed: Tensor, order: str, num_heads: int) -> list[Tensor]:
    """q, k and v, their rows over (g d), from rows over `order`."""
    sizes = {"qkv": 3, "g": num_heads, "d": packed.shape[0] // (3 * num_heads)}
    axes = order.split()
    split = packed.reshape(*(sizes[axis] for axis in axes), *packed.shape[1:])
    plain = split.movedim([axes.index(axis) for axis in PLAIN_ORDER.split()], [0, 1, 2])
    return [part.flatten(0, 1) for part in plain.unbind(0)]


def pack(parts: Iterable[Tensor], order: str, num_heads: int) -> Tensor:
    """Rows over `order` from q, k and v, whose rows are over (g d): `unpack` undone."""
    plain = torch.stack([part.unflatten(0, (num_heads, -1)) for part in parts])
    axes = PLAIN_ORDER.split()
    return plain.movedim([axes.index(axis) for axis in order.split()], [0, 1, 2]).flatten(0, 2)
