"""The layouts in which pixel attention's weights live: their keys, shapes and head orders."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import InputError, nearest
from regard.layers.checks import divisor
from regard.layers.pixel_attention import PixelParams, check_eps


@dataclass(frozen=True)
class PixelLayout:
    """How one library names and shapes the parameters of a pixel attention block.

    A key is prefix + name + join + "weight" or "bias", at any depth. `separate` names the
    projections of q, k and v; `packed` the one that holds all three, whose output rows run, from
    the slowest to the fastest, over `order`: q, k, v; heads g; width d. Projection weights have
    `ones` trailing axes of length 1 (they are convolutions). A projection in `bias_optional` may
    lack its bias, which then is zero.

    `num_heads`, `num_groups` and `eps` are what the library fixes; None must be told. Groups are
    never narrower than `group_width` channels. `beside` names children of the same parent that
    mean another computation.
    """

    norm: str
    out: str
    separate: tuple[str, str, str] | None = None
    packed: str | None = None
    order: str = "qkv g d"
    join: str = "."
    ones: int = 0
    bias_optional: tuple[str, ...] = ("k",)
    num_heads: int | None = None
    num_groups: int | None = 32
    group_width: int = 1
    eps: float | None = None
    beside: tuple[str, ...] = ()


DIFFUSERS_OTHER = (
    *("norm_q", "norm_k", "norm_cross", "spatial_norm", "add_q_proj", "add_k_proj", "add_v_proj"),
    *("to_add_out", "processor"),
)

LAYOUTS: dict[str, PixelLayout] = {
    # the ten keys of `regard.pixel_attention`
    "regard": PixelLayout("norm", "out", ("q", "k", "v"), join="_", num_groups=None, eps=1e-5),
    # diffusers' Attention in UNet2DModel, AutoencoderKL, VQModel; U-Nets 1e-5, VAEs 1e-6
    "diffusers": PixelLayout(
        "group_norm",
        "to_out.0",
        ("to_q", "to_k", "to_v"),
        bias_optional=("q", "k", "v"),
        beside=DIFFUSERS_OTHER,
    ),
    # the same before diffusers 0.15
    "diffusers-old": PixelLayout("group_norm", "proj_attn", ("query", "key", "value")),
    # AttnBlock of latent-diffusion, Stable Diffusion's and FLUX's autoencoders: 1×1 convolutions
    "ldm": PixelLayout("norm", "proj_out", ("q", "k", "v"), ones=2, num_heads=1, eps=1e-6),
    # AttentionBlock of openai/guided-diffusion with use_new_attention_order=True, and without
    "guided": PixelLayout(
        "norm", "proj_out", packed="qkv", ones=1, eps=1e-5, beside=("encoder_kv",)
    ),
    "guided-legacy": PixelLayout(
        "norm",
        "proj_out",
        packed="qkv",
        order="g qkv d",
        ones=1,
        eps=1e-5,
        beside=("encoder_kv",),
    ),
    # MONAI's SpatialAttentionBlock, use_combined_linear=False and True
    "monai": PixelLayout(
        "norm",
        "attn.out_proj",
        ("attn.to_q", "attn.to_k", "attn.to_v"),
        packed="attn.qkv",
        eps=1e-6,
    ),
    # UNetBlock of NVlabs/edm, its attention alone; SongUNet 1e-6, DhariwalUNet 1e-5
    "edm": PixelLayout("norm2", "proj", packed="qkv", order="g d qkv", ones=2, group_width=4),
}


class BlockFacts(NamedTuple):
    """What a block's computation needs beyond its tensors."""

    channels: int
    num_heads: int
    num_groups: int
    eps: float


def layout_named(name: str) -> PixelLayout:
    """The layout of that name, or a refusal."""
    if name not in LAYOUTS:
        raise InputError(f"there is no layout {name!r}; {nearest(name, LAYOUTS)}")
    return LAYOUTS[name]


def names(layout: PixelLayout, packed: bool) -> dict[str, str]:
    """The layout's name of each projection and of the norm."""
    if packed:
        return {"norm": layout.norm, "qkv": layout.packed or "", "out": layout.out}
    q, k, v = layout.separate or ("", "", "")
    return {"norm": layout.norm, "q": q, "k": k, "v": v, "out": layout.out}


def key_map(layout: PixelLayout, packed: bool) -> dict[tuple[str, str], str]:
    """(projection or "norm", "weight" or "bias") to the key within a block."""
    return {
        (role, kind): f"{name}{layout.join}{kind}"
        for role, name in names(layout, packed).items()
        for kind in ("weight", "bias")
    }


def forms(layout: PixelLayout) -> list[bool]:
    """Whether a block may be packed: [False], [True], or both."""
    return [form for form in (False, True) if (layout.packed if form else layout.separate)]


def both_ways(fact: str) -> str:
    """A fact as Python and as the command line name it."""
    words = f"{fact} (--{fact.replace('_', '-')})"
    return f"{words} or dim_head (--dim-head)" if fact == "num_heads" else words


def facts_of(
    layout: PixelLayout,
    name: str,
    channels: int,
    *,
    num_heads: int | None,
    dim_head: int | None,
    num_groups: int | None,
    eps: float | None,
) -> BlockFacts:
    """The facts of a block with that many channels: those given, else those the library fixes."""
    if num_heads is not None and dim_head is not None:
        raise InputError(f"num_heads={num_heads} and dim_head={dim_head}: give one of the two")
    if dim_head is not None:
        num_heads = channels // divisor(dim_head, "dim_head", channels, "channels")
    num_heads = layout.num_heads if num_heads is None else num_heads
    eps = layout.eps if eps is None else eps
    if num_groups is None and layout.num_groups is not None:
        num_groups = min(layout.num_groups, channels // layout.group_width)
    told = {"num_heads": num_heads, "num_groups": num_groups, "eps": eps}
    lacking = [fact for fact, value in told.items() if value is None]
    if lacking or num_heads is None or num_groups is None or eps is None:
        raise InputError(
            f"weights of the layout {name} do not say their {' and '.join(lacking)}: give "
            f"{', '.join(map(both_ways, lacking))}, as the model that they come from was built"
        )
    return BlockFacts(
        channels,
        divisor(num_heads, "num_heads", channels, "channels"),
        divisor(num_groups, "num_groups", channels, "channels"),
        check_eps(eps),
    )


# Pixel attention blocks within a state dict: found, checked, read and written.


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
