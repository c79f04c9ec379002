"""What to do when the numbers go wrong: name where a NaN began, notice a loss that leaps."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.data.batches import Batch
from regard.errors import InputError
from regard.interpret.record import record
from regard.interpret.recording import Recording
from regard.training.metrics import NotFiniteAnswer
from regard.training.run_folder import RunStopped
from regard.training.step import Job, part_loss
from regard.training.stop import Interrupted


class NotFinite(RunStopped):
    """The loss or its gradient was infinite or not a number; nothing was overwritten."""


class LossWatch:
    """Says once when a loss is far above its own history.

    Far: above the running mean by six running standard deviations, both of log loss over about
    the last hundred steps, and by a factor 2 at least. The first fifty steps only teach it.
    """

    def __init__(self) -> None:
        self.mean = 0.0
        self.square = 0.0
        self.seen = 0
        self.said = False

    def check(self, loss: float) -> bool:
        """Take in a step's loss; True if it is the first to leap."""
        value = math.log(max(loss, 1e-12))
        spread = math.sqrt(max(self.square - self.mean**2, 0.0))
        limit = self.mean + max(6 * spread, math.log(2))
        leaps = self.seen >= 50 and value > limit and not self.said
        self.said = self.said or leaps
        self.seen += 1
        share = max(1 / self.seen, 0.01)
        self.mean += share * (value - self.mean)
        self.square += share * (value**2 - self.square)
        return leaps


def diagnose(
    model: nn.Module, parts: Sequence[Batch], loss_of: Callable[[int, Batch], Tensor]
) -> str:
    """Run a step's microbatches again with hooks and say where the first bad number arose.

    `loss_of(i, part)` is the forward pass that training made of the i-th microbatch. Looked for,
    in this order: weights, images, the output of a module, a module's gradient, the loss. Empty if
    all is finite this time.
    """
    found = [f"the weight {n} itself" for n, t in model.state_dict().items() if not finite(t)]
    for i, part in enumerate(parts):
        odd = [int(n) for n, x in zip(part.indices, part.images, strict=True) if not finite(x)]
        found += [f"the training image at position {n}" for n in odd]
        with Watched(model) as watched:
            loss = loss_of(i, part)
            # Whatever was found: other processes may wait for this one's gradient.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # hooks that no gradient reaches
                loss.backward()
        if watched.first:
            found.append(f"{watched.first} ({watched.largest_logit()})")
        if not finite(loss):
            found.append(f"the loss ({watched.largest_logit()})")
    return found[0] if found else ""


class Watched:
    """Within `with`, notes a module's first bad output or gradient, and the attention logits."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.first = ""
        self._seen: Recording | None = None
        self._recording = contextlib.ExitStack()
        self._handles: list[Any] = []

    def __enter__(self) -> "Watched":
        for name, module in self.model.named_modules():
            label = f"{name or 'the model'} ({type(module).__name__})"
            self._handles.append(module.register_forward_hook(self._forward(label)))
            self._handles.append(module.register_full_backward_hook(self._backward(label)))
        with contextlib.suppress(InputError):  # a model that cannot be read
            self._seen = self._recording.enter_context(record(self.model, keep="largest_logit"))
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()
        with contextlib.suppress(InputError):  # a model without attention
            self._recording.close()

    def largest_logit(self) -> str:
        """The largest attention logit seen, in words."""
        found = {
            name: float(attention.need("largest_logit").nan_to_num(nan=-math.inf).amax())
            for name, attention in (self._seen or {}).items()
        }
        name = max(found, key=lambda n: found[n], default="")
        if found.get(name, -math.inf) == -math.inf:
            return "no attention logit was seen before it"
        return f"the largest attention logit was {found[name]:.3g}, in {name}"

    def _forward(self, label: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not self.first and not all(finite(t) for t in tensors_in(output)):
                self.first = f"the output of {label}"

        return hook

    def _backward(self, label: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if not self.first and not all(finite(t) for t in tensors_in(inputs)):
                self.first = f"the gradient at the input of {label}"

        return hook


@torch.no_grad()
def where_not_finite(model: nn.Module, image: Tensor) -> str:
    """Run the model on one image (c, h, w) and say whose output was not finite; empty if none."""
    with Watched(model) as watched:
        model(image.unsqueeze(0))
    return f"{watched.first} ({watched.largest_logit()})" if watched.first else ""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors of a module's output, however nested."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def finite(tensor: Tensor) -> bool:
    """Whether every number is one. Of a sharded tensor this process's part is looked at."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return bool(torch.isfinite(local).all())


# Why a run stops before its end, what is safe, and the way back, in words.


def not_finite(job: Job, batch: Batch) -> NotFinite:
    """Run the step again to find out why, and offer the way back."""
    recipe, progress = job.config.recipe, job.state.progress
    parts = batch.split(recipe.microbatch)
    loss_of: Callable[[int, Batch], Tensor] = lambda i, part: part_loss(  # noqa: E731
        job, job.state.model, part, (progress.step, job.processes.rank * len(parts) + i)
    )
    job.state.model.zero_grad()
    found = [
        name for name in job.processes.gather(diagnose(job.state.model, parts, loss_of)) if name
    ]
    cause = f"first not finite: {found[0]}" if found else "run again, every part of it is finite"
    return NotFinite(
        f"the loss or its gradient at step {progress.step + 1} is not finite; {cause}. Nothing was "
        f"overwritten. {way_back_slower(job)}"
    )


def bad_answer(job: Job, error: NotFiniteAnswer) -> NotFinite:
    """Weights that answer with no finite numbers are not kept: name the module, offer a way back.

    Called while the model holds the weights that evaluation uses, on all processes together.
    """
    split = job.data.splits["val"]
    place = next(i for i in range(len(split)) if split.name(i) == error.name)
    image = job.config.preprocess(split.read(place)).to(job.processes.device)
    found = where_not_finite(job.state.model, image)
    cause = f"; first not finite: {found}" if found else ""
    return NotFinite(
        f"after step {job.state.progress.step} {error}{cause}. Nothing was overwritten. "
        f"{way_back_slower(job)}"
    )


def way_back_slower(job: Job) -> str:
    """How to go on from what is saved, and with a smaller rate, in words."""
    command = job.folder.resume_command("--lr", f"{job.config.recipe.lr / 3:.2g}")
    return f"{job.folder.way_back()}; {command} goes on at a third of the rate"


def unreadable(job: Job, batch: Batch) -> RunStopped:
    """More than half of a batch could not be read: that is no bad file but a lost disk."""
    _, name, reason = next(iter(batch.unreadable), (0, "an image", "read by another process"))
    return RunStopped(
        f"more than half of the images of step {job.state.progress.step + 1} could not be read, "
        f"such as {name} ({reason}); bring the data back. {job.folder.way_back()}"
    )


def interrupted(job: Job, number: int) -> Interrupted:
    """The clean stop after a signal."""
    return Interrupted(
        f"stopped after step {job.state.progress.step} of {job.config.recipe.steps}, saved. "
        f"{job.folder.resume_command()} goes on",
        number,
    )
