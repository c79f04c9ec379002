"""What a run is at a step: weights, their average, the optimizers' state, the best so far."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass
class Progress:
    """The numbers of a checkpoint, beside its tensors."""

    step: int = 0
    best_step: int = 0
    best_accuracy: float = -1.0
    best_loss: float = float("inf")
    seconds: float = 0.0
    """Time spent training, over all segments."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: a run without an evaluation has no best loss."""
        values = asdict(self)
        return {k: None if v == float("inf") else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Progress":
        """Rebuild from `to_dict`'s result; what it lacks, or has of another kind, is refused."""
        known: dict[str, Any] = {k: float("inf") if v is None else v for k, v in values.items()}
        for name, kind in cls.__annotations__.items():
            if type(known[name]) not in ((int,) if kind is int else (int, float)):
                raise TypeError(f"{name} is {known[name]!r}")
        return cls(**known)


@dataclass
class TrainState:
    """A model in training. `model` is bare: what wraps it for several processes is the loop's."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    ema_decay: float = 0.0
    progress: Progress = field(default_factory=Progress)
    ema: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ema_decay and not self.ema:
            self.ema = {n: p.detach().clone() for n, p in self.model.named_parameters()}

    @torch.no_grad()
    def update_ema(self) -> None:
        """average ← d · average + (1 - d) · weights, with d = min(decay, (1 + s) / (10 + s)).

        The ramp in the step s keeps the first weights, which are noise, out of the average.
        """
        if not self.ema:
            return
        step = self.progress.step
        decay = min(self.ema_decay, (1 + step) / (10 + step))
        now = [p.detach() for p in self.model.parameters()]
        torch._foreach_lerp_(list(self.ema.values()), now, 1 - decay)

    @contextlib.contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Within, the model holds the weights that evaluation uses, and is in eval mode."""
        parameters = dict(self.model.named_parameters())
        kept = {name: parameters[name].detach().clone() for name in self.ema}
        was_training = self.model.training
        self._set(parameters, self.ema)
        self.model.eval()
        try:
            yield
        finally:
            self._set(parameters, kept)
            self.model.train(was_training)

    @staticmethod
    @torch.no_grad()
    def _set(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            parameters[name].copy_(value)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state by a flat name; they are views, not copies."""
        found = {f"model.{n}": t for n, t in self.model.state_dict().items()}
        found |= {f"ema.{n}": t for n, t in self.ema.items()}
        for name, optimizer, parameter in self._optimized():
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{name}/{key}"] = value
        return found

    def prepare(self, shapes: Mapping[str, torch.Size]) -> None:
        """Make the optimizers' empty state, of which a checkpoint tells the names and shapes."""
        keys: dict[str, list[str]] = {}
        for full in shapes:
            if full.startswith("optimizer."):
                name, key = full.removeprefix("optimizer.").rsplit("/", 1)
                keys.setdefault(name, []).append(key)
        for name, optimizer, parameter in self._optimized():
            for key in keys.get(name, ()):
                shape = shapes[f"optimizer.{name}/{key}"]
                like = shape == parameter.shape
                optimizer.state[parameter][key] = (
                    torch.zeros_like(parameter, requires_grad=False)
                    if like
                    else torch.zeros(shape, device=parameter.device)
                )

    def _optimized(self) -> Iterator[tuple[str, Optimizer, Tensor]]:
        owners = {
            id(parameter): optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for name, parameter in self.model.named_parameters():
            if id(parameter) in owners:
                yield name, owners[id(parameter)], parameter


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or what its shards on all processes make together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_sharded(tensors: Mapping[str, Tensor]) -> bool:
    """Whether any tensor is spread over processes."""
    return any(hasattr(tensor, "full_tensor") for tensor in tensors.values())
