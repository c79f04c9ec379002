"""vit-pytorch's SimpleViT with QK norm, plainly, on its own state dict; shares no code with ours.

Every conversion of a SimpleViT is checked against it where vit-pytorch is not installed.
"""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm

from regard.convert.layouts import LAYOUTS, BlockFacts, PixelLayout, is_packed, key_map
from regard.convert.request import Conversion
from regard.errors import InputError
from regard.layers.pixel_attention import PixelAttention
from regard.models.simple_vit import SimpleViT


def vit_reference(state: Mapping[str, Tensor], config: Mapping[str, Any], images: Tensor) -> Tensor:
    """Features (b, dim) of images (b, c, h, w), in their dtype."""
    p, q = config["patch_size"]
    b, c, height, width = images.shape
    h, w = height // p, width // q
    x = images.unfold(2, p, p).unfold(3, q, q)  # b c h w p q
    x = torch.einsum("bchwpq->bhwpqc", x).reshape(b, h * w, p * q * c)

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ state[f"{name}.weight"].T
        return y + state[f"{name}.bias"] if f"{name}.bias" in state else y

    def unit(x: Tensor, gamma: Tensor) -> Tensor:
        length = x.square().sum(dim=-1, keepdim=True).sqrt().clamp_min(1e-12)
        return x / length * x.shape[-1] ** 0.5 * gamma

    x = norm(
        linear(norm(x, "to_patch_embedding.1"), "to_patch_embedding.2"), "to_patch_embedding.3"
    )
    x = x + positions(h, w, x.shape[-1], x)
    for i in range(config["depth"]):
        attention, mlp = f"transformer.layers.{i}.0", f"transformer.layers.{i}.1.net"
        qkv = linear(norm(x, f"{attention}.norm"), f"{attention}.to_qkv")
        qs, ks, vs = (part.split(config["dim_head"], dim=-1) for part in qkv.chunk(3, dim=-1))
        heads = []
        for g in range(config["heads"]):
            query = unit(qs[g], state[f"{attention}.q_norm.gamma"][g])
            key = unit(ks[g], state[f"{attention}.k_norm.gamma"][g])
            heads.append(torch.softmax(query @ key.transpose(1, 2), dim=-1) @ vs[g])
        x = x + linear(torch.cat(heads, dim=-1), f"{attention}.to_out")
        x = x + linear(gelu(linear(norm(x, f"{mlp}.0"), f"{mlp}.1")), f"{mlp}.3")
    return norm(norm(x, "transformer.norm").mean(dim=1), "linear_head")


def positions(h: int, w: int, dim: int, like: Tensor) -> Tensor:
    """Sine and cosine of column and row, as vit-pytorch's `posemb_sincos_2d`."""
    omega = 10000 ** -(torch.arange(dim // 4) / (dim // 4 - 1))
    rows = torch.arange(h).repeat_interleave(w)[:, None] * omega
    columns = torch.arange(w).repeat(h)[:, None] * omega
    return torch.cat((columns.sin(), columns.cos(), rows.sin(), rows.cos()), dim=1).to(like)


# One input through the source's computation and the target's: converted weights must agree.


TOLERANCE = 1e-5


class Check(NamedTuple):
    """What ran on one block or model, and the largest difference of the outputs."""

    prefix: str
    source: str
    target: str
    difference: float

    def __str__(self) -> str:
        where = self.prefix.rstrip(".") or "the model"
        return f"{where}: {self.source} and {self.target} differ by {self.difference:.1e}"


def verify(conversion: Conversion, state_dict: Mapping[str, Tensor]) -> list[Check]:
    """Run the source and the target of each block on one input, in float64.

    Each is the library's own module where it is installed, else a float64 reference written from
    the library's definition. Weights that are not finite count as zero. Raises InputError where
    outputs differ by more than 1e-5.
    """
    checks = [check_block(conversion, state_dict, prefix) for prefix in conversion.blocks]
    checks += [check_vit(conversion, state_dict, prefix) for prefix in conversion.vits]
    bad = [str(check) for check in checks if not check.difference <= TOLERANCE]
    if bad:
        raise InputError(
            f"the converted weights give other outputs: {'; '.join(bad[:5])}; at most "
            f"{TOLERANCE:.0e} is allowed. Check the facts that were given (heads, groups, eps)"
        )
    return checks


def difference(left: Tensor, right: Tensor) -> float:
    """The largest difference; NaN where one is."""
    return float((left - right).abs().max())


def finite(weights: Tensor) -> Tensor:
    """The weights in float64; what is NaN or infinite, where that was allowed, as zero.

    One NaN would make every output NaN, and layouts that differ could not be told.
    """
    return torch.nan_to_num(weights.double(), nan=0.0, posinf=0.0, neginf=0.0)


def check_block(conversion: Conversion, state_dict: Mapping[str, Tensor], prefix: str) -> Check:
    """Both layouts of one pixel attention block on one input."""
    facts = conversion.blocks[prefix]
    x = torch.empty(2, facts.channels, 6, 5, dtype=torch.float64)
    x.normal_(generator=torch.Generator().manual_seed(0))
    outputs = []
    ran = []
    sides = ((conversion.source, state_dict), (conversion.target, conversion.tensors))
    for name, tensors in sides:
        layout = LAYOUTS[name]
        held = {key for form in (False, True) for key in key_map(layout, form).values()}
        block = {k: finite(tensors[prefix + k]) for k in sorted(held) if prefix + k in tensors}
        library, run = runner(name)
        with torch.no_grad():
            outputs.append(run(block, facts, x))
        ran.append(library)
    return Check(prefix, ran[0], ran[1], difference(outputs[0], outputs[1]))


Runner = Callable[[Mapping[str, Tensor], BlockFacts, Tensor], Tensor]


def runner(name: str) -> tuple[str, Runner]:
    """What computes a block of the layout `name`, in words and as a function."""
    if name == "regard":
        return "regard", run_regard
    if name == "diffusers" and importlib.util.find_spec("diffusers"):
        return "diffusers", run_diffusers
    if name == "monai" and importlib.util.find_spec("monai"):
        return "monai", run_monai
    layout = LAYOUTS[name]
    return f"reference of {name}", lambda block, facts, x: reference(layout, block, facts, x)


def run_regard(block: Mapping[str, Tensor], facts: BlockFacts, x: Tensor) -> Tensor:
    """Our module."""
    complete = {"k_bias": torch.zeros_like(x[0, :, 0, 0])} | dict(block)
    return PixelAttention.from_params(complete, facts.num_groups, facts.num_heads, eps=facts.eps)(x)


def run_diffusers(block: Mapping[str, Tensor], facts: BlockFacts, x: Tensor) -> Tensor:
    """diffusers' Attention as its U-Nets and VAEs build it."""
    from diffusers.models.attention_processor import Attention

    zeros = {f"to_{role}.bias": torch.zeros_like(x[0, :, 0, 0]) for role in "qkv"}
    module = Attention(
        facts.channels,
        heads=facts.num_heads,
        dim_head=facts.channels // facts.num_heads,
        bias=True,
        norm_num_groups=facts.num_groups,
        eps=facts.eps,
        residual_connection=True,
    ).double()
    module.load_state_dict(zeros | dict(block))
    return module(x)


def run_monai(block: Mapping[str, Tensor], facts: BlockFacts, x: Tensor) -> Tensor:
    """MONAI's SpatialAttentionBlock."""
    from monai.networks.blocks.spatialattention import SpatialAttentionBlock

    packed = is_packed(LAYOUTS["monai"], set(block))
    zeros = {} if packed else {"attn.to_k.bias": torch.zeros_like(x[0, :, 0, 0])}
    module = SpatialAttentionBlock(
        2,
        facts.channels,
        facts.channels // facts.num_heads,
        facts.num_groups,
        facts.eps,
        use_combined_linear=packed,
    ).double()
    module.load_state_dict(zeros | dict(block))
    return module(x)


def reference(
    layout: PixelLayout, block: Mapping[str, Tensor], facts: BlockFacts, x: Tensor
) -> Tensor:
    """The block as the layout's library defines it, plainly: it shares no code with converting.

    The heads are taken from the projected channels y (b, 3c, n) as each source takes them.
    """
    keys = key_map(layout, is_packed(layout, set(block)))
    b, c, h, w = x.shape
    z = nn.functional.group_norm(
        x,
        facts.num_groups,
        block[keys["norm", "weight"]],
        block[keys["norm", "bias"]],
        facts.eps,
    ).flatten(2)

    def project(role: str, z: Tensor) -> Tensor:
        y = block[keys[role, "weight"]].flatten(1) @ z
        bias = block.get(keys[role, "bias"])
        return y if bias is None else y + bias[:, None]

    if ("qkv", "weight") in keys:
        y = project("qkv", z)
    else:
        y = torch.cat([project(role, z) for role in ("q", "k", "v")], dim=1)
    g, d = facts.num_heads, c // facts.num_heads
    if layout.order == "qkv g d":
        q, k, v = (part.reshape(b * g, d, h * w) for part in y.chunk(3, dim=1))
    elif layout.order == "g qkv d":
        q, k, v = y.reshape(b * g, 3 * d, h * w).split(d, dim=1)
    else:
        q, k, v = y.reshape(b * g, d, 3, h * w).unbind(2)
    weights = torch.softmax(torch.einsum("tdn,tdm->tnm", q, k) / d**0.5, dim=2)
    mixed = torch.einsum("tnm,tdm->tdn", weights, v).reshape(b, c, h * w)
    return x + project("out", mixed).reshape(x.shape)


def check_vit(conversion: Conversion, state_dict: Mapping[str, Tensor], prefix: str) -> Check:
    """Our SimpleViT and vit-pytorch's on one image; needs the model's config."""
    config = conversion.vits[prefix]
    if config is None:
        raise InputError("to run a SimpleViT its image_size is needed, and channels or patch_size")
    sides = {conversion.source: state_dict, conversion.target: conversion.tensors}
    states = {
        name: {k.removeprefix(prefix): finite(t) for k, t in side.items() if k.startswith(prefix)}
        for name, side in sides.items()
    }
    ours = {k: t for k, t in states["regard"].items() if not k.startswith("classifier.")}
    model = SimpleViT(**config, dtype=torch.float64)
    model.load_state_dict(ours)
    images = torch.empty(2, config["channels"], *config["image_size"], dtype=torch.float64)
    images.normal_(generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = model(images)
        if importlib.util.find_spec("vit_pytorch"):
            library = "vit-pytorch"
            expected = run_vit_pytorch(states["vit-pytorch-qk"], config, images)
        else:
            library = "reference of vit-pytorch-qk"
            expected = vit_reference(states["vit-pytorch-qk"], config, images)
    ran = ("regard", library) if conversion.source == "regard" else (library, "regard")
    return Check(prefix, *ran, difference(expected, output))


def run_vit_pytorch(state: Mapping[str, Tensor], config: dict, images: Tensor) -> Tensor:
    """vit-pytorch's own model."""
    from vit_pytorch.simple_vit_with_qk_norm import SimpleViT as TheirViT

    arguments = {key: value for key, value in config.items() if key != "qk_norm"}
    arguments |= {key: tuple(config[key]) for key in ("image_size", "patch_size")}
    module = TheirViT(**arguments).double()
    module.load_state_dict(state)
    return module(images)
