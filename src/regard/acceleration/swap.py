"""Somebody else's model with our attention, on the same parameters; and back."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from regard.acceleration.compare import Trial, first_inputs, try_swap
from regard.acceleration.modules import (
    Accelerated,
    RegardProcessor,
    accelerated_class,
    is_hooked,
    original_class,
)
from regard.errors import InputError
from regard.foreign import Left, Spec, recognise
from regard.layers.pixel_attention import FoldCache

Model = TypeVar("Model", bound=nn.Module)


class Swapped(NamedTuple):
    """One attention that now computes with our kernels.

    `before` and `after` are the largest errors of the module's output against float64, of the
    original and of ours, on the input named in the report.
    """

    path: str
    was: str
    became: str
    kernel: str
    reason: str
    before: float
    after: float

    def __str__(self) -> str:
        errors = f"error {self.before:.1e} before, {self.after:.1e} after"
        return (
            f"{self.path}: {self.was} became {self.became}; {self.kernel}: {self.reason}; {errors}"
        )


class Kept(NamedTuple):
    """One attention that was left as it is, and why."""

    path: str
    was: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.was} left: {self.reason}"


@dataclass(frozen=True)
class Report:
    """What `accelerate` did, module by module, and the input on which modules were tried."""

    swapped: tuple[Swapped, ...]
    left: tuple[Kept, ...]
    tried_on: str

    def __str__(self) -> str:
        head = f"{len(self.swapped)} swapped, {len(self.left)} left; tried on {self.tried_on}"
        return "\n".join([head, *(f"  {entry}" for entry in (*self.swapped, *self.left))])


def accelerate(model: Model, example: Any = None) -> tuple[Model, Report]:
    """Let every attention that we know in a model compute with `attend`; returns it and a report.

    The model is changed in place and keeps its parameters (the same objects), state dict keys,
    hooks, optimizers, isinstance relations, and can be trained, compiled, copied and pickled.
    Known are diffusers' self-attention, latent-diffusion's and guided-diffusion's blocks, MONAI's,
    timm's and vit-pytorch's ViT attention (see `regard.foreign.recognise`); others are left and
    listed. Layers that are not plain (LoRA, quantised, offloaded, parametrised, hooked) keep their
    own call, and calls with a mask, a context or active dropout of weights run as before.

    Before a swap is kept, copies of the module run, as it was and swapped: with random weights
    in float64, where both must agree; and with its own on what it is given when the model runs
    on `example` (a tensor, a tuple of arguments or a dictionary of keywords), where the error
    against float64 may be at most twice the original's. Without an example that input is normal
    noise, a 16×16 map or 256 tokens. `restore` undoes everything.

    Raises:
        InputError: the model is no module, is compiled to TorchScript, or does not run on the
            example.
    """
    check_module(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "a TorchScript model cannot be changed; accelerate the one it was made from"
        )
    found = {path: (module, what) for path, module, what in attentions(model)}
    known = {path: module for path, (module, what) in found.items() if isinstance(what, Spec)}
    inputs = {} if example is None else first_inputs(model, known, example)
    swapped: list[Swapped] = []
    left: list[Kept] = []
    for path, (module, what) in found.items():
        name = path or type(module).__name__
        kind = f"{type(module).__module__.split('.')[0]} {type(module).__name__}"
        if isinstance(what, Left):
            left.append(Kept(name, kind, what.reason))
            continue
        if is_accelerated(module):
            left.append(Kept(name, what.library, "it is accelerated already"))
            continue
        reason = obstacle(module, what)
        if reason is None and example is not None and path not in inputs:
            reason = "the model did not give it one input and nothing else on the example"
        trial = try_swap(module, what, inputs.get(path), swap) if reason is None else None
        if trial is None or trial.refused:
            left.append(Kept(name, what.library, reason or str(trial and trial.refused)))
            continue
        swap(module, what)
        swapped.append(entry(name, what, trial))
    tried = "noise, 16×16 maps or 256 tokens" if example is None else "the example"
    return model, Report(tuple(swapped), tuple(left), tried)


def entry(name: str, spec: Spec, trial: Trial) -> Swapped:
    """A line of the report."""
    became = "pixel attention" if spec.residual else "attend"
    return Swapped(
        name, spec.library, became, trial.kernel, trial.reason, trial.before, trial.after
    )


def restore(model: Model) -> Model:
    """Undo `accelerate`: every class and processor is the one it was. Returns the model."""
    check_module(model)
    for module in model.modules():
        if isinstance(module, Accelerated):
            del module.__dict__["regard_spec"], module.__dict__["regard_fold"]
            module.__class__ = original_class(type(module))
        elif isinstance(getattr(module, "processor", None), RegardProcessor):
            module.set_processor(module.processor.original)  # type: ignore[operator, union-attr]
    return model


def check_module(model: object) -> None:
    """Refuse what has no modules to change, such as a state dict or a pipeline."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the model is a {type(model).__name__}; give a torch.nn.Module, such as the unet or "
            "vae of a pipeline"
        )


def attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module, Spec | Left]]:
    """Path, module and description of every attention.

    Parts of one that is described are left out, and so are containers of others ("AttnDownBlock").
    """
    found = {path: (module, recognise(module)) for path, module in model.named_modules()}
    described = [path for path, (_, what) in found.items() if isinstance(what, Spec)]
    named = [path for path, (_, what) in found.items() if what is not None]
    for path, (module, what) in found.items():
        if what is None or any(within(path, outer) for outer in described):
            continue
        if isinstance(what, Spec) or not any(within(inner, path) for inner in named):
            yield path, module, what


def within(inner: str, outer: str) -> bool:
    """Whether the module at one path is a part of the one at the other."""
    return inner != outer and (outer == "" or inner.startswith(outer + "."))


def is_accelerated(module: Any) -> bool:
    """Whether the module computes with our kernels."""
    processor = getattr(module, "processor", None)
    return isinstance(module, Accelerated) or isinstance(processor, RegardProcessor)


def obstacle(module: Any, spec: Spec) -> str | None:
    """Why a described module cannot be swapped as it is."""
    if "forward" in module.__dict__ and not hasattr(module, "set_processor"):
        return "its forward was replaced on the object"
    hooked = [name for name in spec.bypassed if is_hooked(module.get_submodule(name))]
    return f"its {hooked[0]} has hooks, and would be passed over" if hooked else None


def swap(module: Any, spec: Spec) -> None:
    """Let one module compute with our kernels."""
    if hasattr(module, "set_processor"):
        module.set_processor(RegardProcessor(module.processor, spec))
        return
    cls: Any = type(module)
    module.__class__ = accelerated_class(cls)
    module.__dict__.update(regard_spec=spec, regard_fold=FoldCache())
