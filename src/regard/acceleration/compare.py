"""Is an accelerated module the same function, and as accurate? Tried on copies, before a swap."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.acceleration.modules import HOOKS, only_input
from regard.errors import InputError
from regard.foreign import Spec, is_map
from regard.layers.attend import explain

# A trial on an example takes at most so many tokens of it: a corner of a map.
MOST_TOKENS = 4096
# In float64 two writings of one formula agree to this; blocks that force float32 within, too.
SAME = 1e-5

Swap = Callable[[nn.Module, Spec], None]


class Trial(NamedTuple):
    """Largest errors against float64, before and after, and which kernel ran, why."""

    before: float
    after: float
    kernel: str
    reason: str
    refused: str | None = None


def refused(why: str) -> Trial:
    """A trial that speaks against a swap."""
    return Trial(math.nan, math.nan, "", "", why)


def try_swap(module: nn.Module, spec: Spec, example: Tensor | None, swap: Swap) -> Trial:
    """Run copies of the module, as it is and swapped, on random weights and on the example.

    With random weights in float64 both must agree, whatever the module's weights are (an output
    layer that starts at zero would hide any difference). With the module's own weights and dtype
    the swapped one's error against the original in float64 may be at most twice the original's.
    """
    try:
        with plainly():
            return tried(module, spec, example, swap)
    except Exception as error:  # the module is somebody else's; whatever it raises, it is left
        return refused(f"it could not be tried: {type(error).__name__}: {error}")


def tried(module: nn.Module, spec: Spec, example: Tensor | None, swap: Swap) -> Trial:
    """`try_swap`, where anything may be raised."""
    device, dtype = place(module)
    reference = widened(module, torch.device("cpu") if device.type == "mps" else device)
    random = randomised(copy.deepcopy(reference))
    x = made_input(random, spec, 12)
    expected = random(x)
    swap(random, spec)
    gap = difference(random(x), expected) / float(expected.abs().max().clamp_min(1))
    if not gap <= SAME:
        return refused(f"with random weights it gives other outputs, by {gap:.1e}")
    if example is None:
        example = made_input(module, spec, 256)
    x = corner(example, spec).to(device, dtype)
    expected = reference(x.to(place(reference)[0]).double())
    own = copy_quiet(module)
    before = difference(own(x), expected)
    swap(own, spec)
    after = difference(own(x), expected)
    kernel, reason = kernel_of(own, x)
    rounding = torch.finfo(dtype).eps * float(expected.abs().max())
    if not after <= 2 * max(before, rounding):
        return Trial(before, after, kernel, reason, "its error is more than twice the original's")
    return Trial(before, after, kernel, reason)


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """No gradients, no autocast, and the random state as it was."""
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def kernel_of(module: nn.Module, x: Tensor) -> tuple[str, str]:
    """The kernel that the module's attention uses on x, and why."""
    try:
        heard = explain(module, x)
    except InputError:
        return "own", "this call goes to its own forward"
    return heard[0].kernel, heard[0].reason


def copy_quiet(module: nn.Module) -> nn.Module:
    """A copy in evaluation mode, without hooks."""
    copied = copy.deepcopy(module).eval()
    for part in copied.modules():
        for hooks in HOOKS:
            getattr(part, hooks).clear()
    return copied


def widened(module: nn.Module, device: torch.device) -> nn.Module:
    """A quiet copy in float64; a norm that casts to float32 (GroupNorm32) becomes torch's own."""
    copied = copy_quiet(module)
    for part in copied.modules():
        if type(part).__name__ == "GroupNorm32":
            part.__class__ = nn.GroupNorm
    return copied.to(device).double()


@torch.no_grad()
def randomised(module: nn.Module) -> nn.Module:
    """The module with normal weights of standard deviation 1/√fan-in, about 1 for vectors."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        fan = math.prod(parameter.shape[1:]) if parameter.ndim > 1 else 1
        noise = torch.empty(parameter.shape, dtype=torch.float64).normal_(generator=generator)
        start = 0.0 if parameter.ndim > 1 else 1.0
        parameter.copy_(start + noise / math.sqrt(fan))
    return module


def made_input(module: nn.Module, spec: Spec, tokens: int) -> Tensor:
    """A normal input of two samples: a square map, or so many tokens."""
    channels = width(module, spec)
    device, dtype = place(module)
    side = math.isqrt(tokens)
    shape = (2, tokens, channels) if spec.takes == "tokens" else (2, channels, side, side)
    if spec.takes == "either" and spec.norm is None:
        shape = (2, tokens, channels)
    generator = torch.Generator().manual_seed(1)
    return torch.empty(shape, dtype=torch.float64).normal_(generator=generator).to(device, dtype)


def width(module: nn.Module, spec: Spec) -> int:
    """Channels of the module's input."""
    layer: Any = module.get_submodule(spec.qkv[0])
    layer = getattr(layer, "base_layer", layer)
    return int(getattr(layer, "in_features", None) or layer.in_channels)


def place(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the last floating-point parameter: norms may be wider than layers."""
    floating = [p for p in module.parameters() if p.is_floating_point()]
    return floating[-1].device, floating[-1].dtype


def corner(x: Tensor, spec: Spec) -> Tensor:
    """At most `MOST_TOKENS` tokens of an input."""
    if not is_map(spec, x):
        return x[:, :MOST_TOKENS]
    side = int(MOST_TOKENS ** (1 / (x.ndim - 2)))
    if x[0, 0].numel() <= MOST_TOKENS:
        return x
    for axis in range(2, x.ndim):
        x = x.narrow(axis, 0, min(side, x.shape[axis]))
    return x


def difference(left: Tensor, right: Tensor) -> float:
    """The largest difference; NaN where one is."""
    return float((left.to(right.device).double() - right).abs().max())


def first_inputs(
    model: nn.Module, modules: Mapping[str, nn.Module], example: Any
) -> dict[str, Tensor]:
    """What each module is given first when the model runs on the example, in evaluation mode."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            x = only_input(args, {k: v for k, v in kwargs.items() if k != "temb"})
            if x is not None and name not in seen:
                seen[name] = x.detach()[:2].clone()

        return hook

    handles = [
        module.register_forward_pre_hook(keep(name), with_kwargs=True)
        for name, module in modules.items()
    ]
    training = {part: part.training for part in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            call(model, example)
    except Exception as error:
        raise InputError(
            f"the model does not run on the example ({type(error).__name__}: {error}); give what "
            "it is called with: a tensor, a tuple of arguments, or a dictionary of keywords"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        for part, mode in training.items():
            part.training = mode
    return seen


def call(model: nn.Module, example: Any) -> Any:
    """The model on an example: keyword arguments, positional ones, or one input."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, (tuple, list)) else model(example)
