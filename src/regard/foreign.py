"""The description of an attention module."""

import inspect
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

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


# An attention module's computation before and after `attend`, by its description.


def project(module: nn.Module, spec: Spec, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (b, g, n, d) that the module computes from its input x, by its own layers."""
    z = x
    shape: Shape = "map" if is_map(spec, x) else "tokens"
    if spec.norm is not None:
        on = spec.norm_on if shape == "map" or spec.norm_on == "flat" else "tokens"
        z = layer_at(module, spec.norm)(reshaped(x, shape, on))
        shape = on
    size = x.shape[2:]
    z = reshaped(z, shape, spec.project_on, size)
    parts = [layer_at(module, name)(z) for name in spec.qkv]
    parts = [reshaped(part, spec.project_on, "tokens") for part in parts]
    q, k, v = split_heads(parts, spec)
    if spec.q_norm is not None:
        q = layer_at(module, spec.q_norm)(q)
    if spec.k_norm is not None:
        k = layer_at(module, spec.k_norm)(k)
    return q, k, v


def merge(module: nn.Module, spec: Spec, heads: Tensor, x: Tensor) -> Tensor:
    """The module's result from the heads' outputs (b, g, n, d) and its input x."""
    y = heads.transpose(1, 2).flatten(2)  # b g n d -> b n (g d)
    given: Shape = "map" if is_map(spec, x) else "tokens"
    y = reshaped(y, "tokens", spec.project_on, x.shape[2:])
    for name in spec.out:
        y = layer_at(module, name)(y)
    y = reshaped(y, spec.project_on, given, x.shape[2:])
    if spec.residual:
        y = x + y
    return y if spec.divisor == 1 else y / spec.divisor


def layer_at(module: Any, path: str) -> Any:
    """The layer at a path, as get_submodule finds it in ten times the time: small models wait."""
    for name in path.split("."):
        module = module._modules[name]
    return module


def split_heads(parts: list[Tensor], spec: Spec) -> list[Tensor]:
    """q, k, v (b, g, n, d) from tokens: three of them (b, n, g·d), or one packed over `order`."""
    if len(parts) == 3:
        return [part.unflatten(2, (spec.num_heads, -1)).transpose(1, 2) for part in parts]
    sizes, axes = split_axes(spec.order, spec.num_heads)
    return list(parts[0].unflatten(2, sizes).permute(axes).unbind(0))


def split_axes(order: str, num_heads: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What packed channels are unflattened to, and the order that makes (qkv, b, g, n, d) of it."""
    axes = order.split()
    sizes = {"qkv": 3, "g": num_heads, "d": -1}
    where = {axis: 2 + i for i, axis in enumerate(axes)}
    return (
        tuple(sizes[axis] for axis in axes),
        (where["qkv"], 0, where["g"], 1, where["d"]),
    )


def is_map(spec: Spec, x: Tensor) -> bool:
    """Whether an input is a map (b, c, …)."""
    return spec.takes == "map" or (spec.takes == "either" and x.ndim == 4)


def reshaped(x: Tensor, given: Shape, wanted: Shape, size: Any = None) -> Tensor:
    """A map (b, c, …), (b, c, n) or tokens (b, n, c) as another of these; `size` of a map."""
    if given == wanted:
        return x
    flat = x.transpose(1, 2) if given == "tokens" else x.flatten(2)
    if wanted == "tokens":
        return flat.transpose(1, 2)
    return flat if wanted == "flat" else flat.unflatten(2, tuple(size))


# Other libraries' attention modules, told by class or by structure, and described.


def recognise(module: nn.Module) -> Spec | Left | None:
    """How a module computes its attention; why it is not described; None if it is no attention.

    diffusers', timm's and MONAI's modules are known by their class; blocks of latent-diffusion,
    guided-diffusion and vit-pytorch, which people copy into their projects, by their structure.
    """
    described = getattr(getattr(module, "processor", module), "regard_spec", None)
    if isinstance(described, Spec):  # accelerated
        return described
    cls = type(module)
    package = cls.__module__.split(".")[0]
    if package == "diffusers" and cls.__name__ == "Attention":
        return from_diffusers(module)
    if package == "timm" and cls.__name__ == "Attention" and cls.__module__ in TIMM_MODULES:
        return from_timm(module)
    if package == "monai" and cls.__name__ in ("SABlock", "SpatialAttentionBlock"):
        return from_monai(module)
    for from_structure in (from_ldm, from_guided, from_vit_pytorch):
        spec = from_structure(module)
        if spec is not None:
            return spec
    name = cls.__name__.lower()
    if package != "regard" and ("attention" in name or "attn" in name):
        return Left(f"{cls.__module__}.{cls.__name__} is not known")
    return None


TIMM_MODULES = ("timm.layers.attention", "timm.models.vision_transformer")
DIFFUSERS_PROCESSORS = ("AttnProcessor", "AttnProcessor2_0")


def from_diffusers(module: Any) -> Spec | Left:
    """diffusers' Attention with a plain processor, attending to its own input."""
    processor = type(module.processor)
    known = processor.__module__ == type(module).__module__
    if not known or processor.__name__ not in DIFFUSERS_PROCESSORS:
        return Left(f"its processor is {processor.__name__}")
    if module.is_cross_attention:
        return Left("cross-attention")
    for name in ("spatial_norm", "added_kv_proj_dim", "norm_cross"):
        if getattr(module, name, None) is not None:
            return Left(f"it has {name}")
    for name in ("only_cross_attention", "fused_projections", "is_causal", "pre_only"):
        if getattr(module, name, False):
            return Left(f"it is {name}")
    if module.inner_kv_dim != module.inner_dim:
        return Left("several queries share a key (kv_heads)")
    normed = module.group_norm is not None
    qk_normed = getattr(module, "norm_q", None) is not None
    if qk_normed and processor.__name__ == "AttnProcessor":
        return Left("its processor leaves its QK norm out")
    return Spec(
        "diffusers Attention",
        "either",
        ("to_out.0", "to_out.1"),
        module.heads,
        module.scale,
        ("to_q", "to_k", "to_v"),
        norm="group_norm" if normed else None,
        norm_on="flat",
        q_norm="norm_q" if qk_normed else None,
        k_norm="norm_k" if getattr(module, "norm_k", None) is not None else None,
        residual=module.residual_connection,
        divisor=module.rescale_output_factor,
    )


def from_timm(module: Any) -> Spec | Left:
    """timm's ViT attention."""
    if getattr(module, "gate", None) is not None:
        return Left("its output is gated")
    after = ("norm",) if isinstance(getattr(module, "norm", None), nn.Module) else ()
    return Spec(
        "timm Attention",
        "tokens",
        (*after, "proj", "proj_drop"),
        module.num_heads,
        module.scale,
        ("qkv",),
        q_norm="q_norm",
        k_norm="k_norm",
        bypassed=("attn_drop",),
    )


def from_monai(module: Any) -> Spec | Left:
    """MONAI's self-attention over tokens, or the same within its block over a map."""
    inner = module.attn if type(module).__name__ == "SpatialAttentionBlock" else module
    if type(inner).__name__ != "SABlock":
        return Left(f"it holds a {type(inner).__name__}")
    if getattr(inner, "causal", False) or getattr(inner, "save_attn", False):
        return Left("it is causal or keeps its weights")
    if getattr(inner, "rel_positional_embedding", None) is not None:
        return Left("it has relative positions")
    if getattr(inner, "attention_dtype", None) is not None:
        return Left("it casts queries and keys")
    path = "attn." if inner is not module else ""
    combined = getattr(inner, "use_combined_linear", True)
    names = ("qkv",) if combined else ("to_q", "to_k", "to_v")
    projected = getattr(inner, "include_fc", True)
    out = ("out_proj", "drop_output") if projected else ("drop_output",)
    bypassed = ("drop_weights", "input_rearrange", "out_rearrange")
    block = inner is not module
    return Spec(
        f"MONAI {type(module).__name__}",
        "map" if block else "tokens",
        tuple(path + name for name in out),
        inner.num_heads,
        inner.scale,
        tuple(path + name for name in names),
        norm="norm" if block else None,
        norm_on="map",
        residual=block,
        bypassed=(*(path + name for name in bypassed), *(("attn",) if block else ())),
    )


def from_ldm(module: nn.Module) -> Spec | None:
    """latent-diffusion's AttnBlock: norm, q, k, v, proj_out, which are 1×1 convolutions."""
    children = dict(module.named_children())
    if set(children) != {"norm", "q", "k", "v", "proj_out"} or own_tensors(module):
        return None
    layers = [children[name] for name in ("q", "k", "v", "proj_out")]
    if not isinstance(children["norm"], nn.GroupNorm) or not all(map(is_conv, layers)):
        return None
    width = children["norm"].num_channels
    return Spec(
        "latent-diffusion AttnBlock",
        "map",
        ("proj_out",),
        1,
        1 / math.sqrt(width),
        ("q", "k", "v"),
        norm="norm",
        norm_on="map",
        project_on="map",
        residual=True,
    )


def from_guided(module: nn.Module) -> Spec | Left | None:
    """guided-diffusion's AttentionBlock: norm, qkv, proj_out, 1-D convolutions, and attention."""
    children = dict(module.named_children())
    if not {"norm", "qkv", "attention", "proj_out"} <= set(children) or own_tensors(module):
        return None
    layers = (children["qkv"], children["proj_out"])
    if not isinstance(children["norm"], nn.GroupNorm) or not all(map(is_conv, layers)):
        return None
    orders = {"QKVAttention": "qkv g d", "QKVAttentionLegacy": "g qkv d"}
    order = orders.get(type(children["attention"]).__name__)
    heads = getattr(children["attention"], "n_heads", None)
    if len(children) > 4 or order is None or not isinstance(heads, int):
        return Left("its order of heads is not known, or it attends to more than its input")
    width = children["norm"].num_channels
    return Spec(
        "guided-diffusion AttentionBlock",
        "map",
        ("proj_out",),
        heads,
        1 / math.sqrt(width // heads),
        ("qkv",),
        order=order,
        norm="norm",
        norm_on="flat",
        project_on="flat",
        residual=True,
        bypassed=("attention",),
    )


def from_vit_pytorch(module: Any) -> Spec | None:
    """vit-pytorch's ViT attention: norm, to_qkv, attend (a softmax), to_out, and maybe QK norm."""
    children = dict(module.named_children())
    optional = {"q_norm", "k_norm", "dropout"}
    if set(children) - optional != {"norm", "attend", "to_qkv", "to_out"} or own_tensors(module):
        return None
    heads = getattr(module, "heads", None)
    if len(inspect.signature(type(module).forward).parameters) != 2:  # masks, contexts, …
        return None
    if not isinstance(children["attend"], nn.Softmax) or not isinstance(heads, int):
        return None
    packed = children["to_qkv"]
    if not hasattr(packed, "out_features") or ("q_norm" in children) != ("k_norm" in children):
        return None
    scale = getattr(module, "scale", 1.0)  # the file with QK norm scales by gains alone
    return Spec(
        "vit-pytorch Attention",
        "tokens",
        ("to_out",),
        heads,
        scale,
        ("to_qkv",),
        norm="norm",
        q_norm="q_norm" if "q_norm" in children else None,
        k_norm="k_norm" if "k_norm" in children else None,
        bypassed=("attend", "dropout") if "dropout" in children else ("attend",),
    )


def own_tensors(module: nn.Module) -> bool:
    """Whether a module owns tensors beside its children's: then its structure is another."""
    return bool(module._parameters or module._buffers)


def is_conv(module: nn.Module) -> bool:
    """A convolution of kernel 1, by class or by what a wrapper shows of it."""
    module = getattr(module, "base_layer", module)  # a wrapper of peft
    return isinstance(module, (nn.Conv1d, nn.Conv2d)) and set(module.kernel_size) == {1}
