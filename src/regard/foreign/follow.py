"""An attention module's computation before and after `attend`, by its description."""

from typing import Any

from torch import Tensor, nn

from regard.foreign.spec import Shape, Spec


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
