"""Foreign attention modules that compute with our kernels, on the parameters that they own."""

import copyreg
import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.convert.layouts import unpack
from regard.foreign import Spec, is_map, layer_at, merge, project
from regard.layers.attend import attend
from regard.layers.pixel_attention import (
    FoldCache,
    PixelParams,
    attend_folded,
    attend_pixels,
    may_fold,
)

PLAIN_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Accelerated:
    """Put before a module's class, in a subclass of both, computes its attention as `compute`.

    A call that the description does not cover (a mask, a context, dropout in training, hooks on
    layers that would be passed over) goes to the module's own forward.
    """

    regard_spec: Spec
    regard_fold: FoldCache

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        x = only_input(args, kwargs)
        if x is None or not covers(self, self.regard_spec, x):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return compute(self, self.regard_spec, x, self.regard_fold)

    def train(self, mode: bool = True) -> Any:
        self.regard_fold.clear()
        return super().train(mode)  # type: ignore[misc]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.regard_fold.clear()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        made, arguments, *state = reduced
        if made is copyreg.__newobj__ and arguments[0] is type(self):  # type: ignore[attr-defined]
            return (revive, (original_class(type(self)), *arguments[1:]), *state)
        return (made, arguments, *state)


@functools.cache
def accelerated_class(cls: Any) -> type:
    """The accelerated subclass of a module class. Its name is kept: libraries go by it."""
    named = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    made: type = type(cls)(cls.__name__, (Accelerated, cls), named)
    return made


def original_class(cls: type) -> type:
    """The class that `accelerated_class` was given."""
    return cls.__bases__[1]


def revive(cls: type, *arguments: Any) -> Any:
    """An empty instance of the accelerated subclass of `cls`, for copy and pickle."""
    made = accelerated_class(cls)
    return made.__new__(made, *arguments)


class RegardProcessor:
    """A processor of diffusers' Attention that computes as `compute`; see `Accelerated`."""

    def __init__(self, original: Any, spec: Spec) -> None:
        self.original = original
        self.regard_spec = spec
        self.regard_fold = FoldCache()

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        given = (encoder_hidden_states, attention_mask, *args, *kwargs.values())
        if any(value is not None for value in given) or not covers(
            attn, self.regard_spec, hidden_states
        ):
            return self.original(
                attn, hidden_states, encoder_hidden_states, attention_mask, temb, *args, **kwargs
            )
        return compute(attn, self.regard_spec, hidden_states, self.regard_fold)


def only_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The one tensor that was given, if all else is None or False."""
    given = [v for v in (*args, *kwargs.values()) if v is not None and v is not False]
    return given[0] if len(given) == 1 and isinstance(given[0], Tensor) else None


def covers(module: nn.Module, spec: Spec, x: Tensor) -> bool:
    """Whether `compute` gives what the module's own forward does on x, now."""
    if spec.takes != "map" and x.ndim != 3 and not is_map(spec, x):
        return False
    for name in spec.bypassed:
        layer = layer_at(module, name)
        if is_hooked(layer) or (isinstance(layer, nn.Dropout) and layer.training and layer.p > 0):
            return False
    return True


def compute(module: nn.Module, spec: Spec, x: Tensor, fold: FoldCache) -> Tensor:
    """The module's attention on x: the pixel block where its layers are plain, else `attend`.

    Layers that are not plain (adapters, quantised, offloaded, parametrised, hooked) keep their
    own call: their `weight`, if they have one, is not what they compute with.
    """
    if getattr(module, "use_checkpoint", False) and torch.is_grad_enabled():
        return checkpoint(compute_once, module, spec, x, fold, use_reentrant=False)
    return compute_once(module, spec, x, fold)


def compute_once(module: nn.Module, spec: Spec, x: Tensor, fold: FoldCache) -> Tensor:
    """`compute`, without the module's own checkpointing."""
    params = pixel_params(module, spec) if spec.residual and is_map(spec, x) else None
    if params is None:
        q, k, v = project(module, spec, x)
        return merge(module, spec, attend(q, k, v, scale=spec.scale), x)
    norm: Any = layer_at(module, spec.norm or "")
    groups, heads, eps = norm.num_groups, spec.num_heads, norm.eps
    pixels = x if x.ndim == 4 else x.flatten(2).unsqueeze(3)
    if may_fold(x) and not module.training and keeps_memory(spec):
        y = attend_folded(pixels, fold.get(params, x, heads), groups, eps)
    else:
        y = attend_pixels(pixels, params, groups, heads, eps)
    y = y.reshape(x.shape)
    return y if spec.divisor == 1 else y / spec.divisor


def keeps_memory(spec: Spec) -> bool:
    """Whether `pixel_params` are views of the module's own, by which a fold knows them again."""
    return spec.order == "qkv g d" or spec.num_heads == 1


def pixel_params(module: nn.Module, spec: Spec) -> PixelParams | None:
    """The ten parameters of a module that is a pixel block of plain layers, else None."""
    if spec.norm is None or spec.q_norm is not None or spec.k_norm is not None:
        return None
    norm: Any = layer_at(module, spec.norm)
    if not is_plain_norm(norm):
        return None
    layers: list[Any] = [layer_at(module, name) for name in (*spec.qkv, spec.out[0])]
    rest = [layer_at(module, name) for name in spec.out[1:]]
    if not all(map(is_plain, layers)) or not all(map(is_nothing, rest)):
        return None
    channels = norm.num_channels
    if layers[-1].weight.shape[:2] != (channels, channels):
        return None
    if not math.isclose(spec.scale, 1 / math.sqrt(channels // spec.num_heads)):
        return None
    flat = [(layer.weight.flatten(1), bias_of(layer)) for layer in layers]
    if len(spec.qkv) == 1:
        packed, packed_bias = flat[0]
        weights = unpack(packed, spec.order, spec.num_heads)
        biases = unpack(packed_bias, spec.order, spec.num_heads)
        flat[:1] = list(zip(weights, biases, strict=True))
    if flat[0][0].shape != (channels, channels):
        return None
    return PixelParams(norm.weight, norm.bias, *(tensor for pair in flat for tensor in pair))


def bias_of(layer: Any) -> Tensor:
    """A layer's bias; zeros where it has none, the same tensor each time."""
    if layer.bias is None:
        weight = layer.weight
        return zeros(weight.shape[0], weight.dtype, weight.device)
    return layer.bias


@functools.lru_cache(maxsize=64)
def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A vector of zeros that is kept."""
    return torch.zeros(size, dtype=dtype, device=device)


def is_hooked(layer: nn.Module) -> bool:
    """Whether calling the layer does more than its class's forward."""
    return "forward" in layer.__dict__ or any(getattr(layer, hooks) for hooks in HOOKS)


def is_plain(layer: Any) -> bool:
    """Whether the layer is exactly a product with its weight, plus its bias, both plain tensors."""
    if type(layer) not in PLAIN_LAYERS or is_hooked(layer):
        return False
    if not isinstance(layer, nn.Linear) and (
        {*layer.kernel_size, *layer.stride, layer.groups} != {1} or {*layer.padding} != {0}
    ):
        return False
    return all(type(tensor) is nn.Parameter for tensor in own_parameters(layer))


def own_parameters(layer: nn.Module) -> list[Any]:
    """A layer's weight and, if it has one, bias, as registered: None where something took it."""
    registered = layer._parameters
    bias = [registered["bias"]] if registered.get("bias") is not None else []
    return [registered.get("weight"), *bias]


def is_plain_norm(norm: Any) -> bool:
    """Whether a group norm is torch's, or guided-diffusion's, which is the same in float32."""
    known = type(norm) is nn.GroupNorm or type(norm).__name__ == "GroupNorm32"
    plain = known and not is_hooked(norm) and norm.affine
    return plain and all(type(tensor) is nn.Parameter for tensor in own_parameters(norm))


def is_nothing(layer: nn.Module) -> bool:
    """Whether a layer returns its input: dropout in evaluation or of nothing."""
    if is_hooked(layer):
        return False
    if type(layer) is nn.Dropout:
        return not layer.training or layer.p == 0
    return type(layer) is nn.Identity
