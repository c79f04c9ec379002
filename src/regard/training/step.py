"""What a run works with, set up."""

import dataclasses
import hashlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.data.batches import Batch, TrainBatches
from regard.data.dataset import Data
from regard.training.checkpoint import Checkpoints, TrainState, whole
from regard.training.config import RunConfig
from regard.training.distributed import Processes
from regard.training.health_probe import HealthProbe
from regard.training.loggers import MetricsLog, Reporter
from regard.training.run_folder import RunFolder


@dataclass
class Job:
    """Everything a run works with, set up."""

    config: RunConfig
    folder: RunFolder
    data: Data
    batches: TrainBatches
    processes: Processes
    model: Any
    """The model to call in training: `state.model`, wrapped for the processes."""
    state: TrainState
    class_weights: Tensor | None
    reference: Tensor | None
    """Images that the model takes statistics from, where it does (see `runs.reference`)."""
    health: HealthProbe | None
    """Measures attention before each evaluation, on the main process, where it can be read."""
    checkpoints: Checkpoints
    log: MetricsLog
    reporter: Reporter

    def evaluation_interval(self) -> int:
        """Steps between evaluations."""
        recipe = self.config.recipe
        steps_an_epoch = len(self.data.splits["train"]) / recipe.batch_size
        return max(1, round(recipe.eval_every * steps_an_epoch))

    def with_recipe(self, **changes: Any) -> "Job":
        """The same job with another recipe."""
        recipe = dataclasses.replace(self.config.recipe, **changes)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, recipe=recipe))

    def noted(self, *notes: str) -> "Job":
        """The job with these notes said aloud and kept in its config, but those it has already."""
        new = [note for note in notes if note not in self.config.notes]
        for note in new:
            self.reporter.say(note)
        config = dataclasses.replace(self.config, notes=(*self.config.notes, *new))
        return dataclasses.replace(self, config=config)


# The arithmetic of a training step: the loss and the gradient of its microbatches.


def accumulate(job: Job, batch: Batch) -> Tensor:
    """Add up the gradient of a step's microbatches; (Σ w_i ℓ_i, Σ w_i) of this process.

    The gradient is that of Σ w_i ℓ_i / B over the batch of all processes, B its size; once Σ w_i
    is known, `run` scales it to Σ w_i ℓ_i / Σ w_i. Several processes average their gradients, hence
    the factor.
    """
    recipe, step = job.config.recipe, job.state.progress.step
    parts = batch.split(recipe.microbatch)
    total = torch.zeros((), device=batch.images.device)
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        with job.processes.accumulating(job.model, not last):
            loss = part_loss(job, job.model, part, (step, job.processes.rank * len(parts) + i))
            job.processes.fabric.backward(loss * (job.processes.world / recipe.batch_size))
        total += loss.detach()
    return torch.stack([total, batch.weights.sum()])


def part_loss(job: Job, model: Any, part: Batch, place: tuple[int, int]) -> Tensor:
    """Σ w_i ℓ_i of one microbatch; dropout and its like draw from (seed, step, microbatch)."""
    recipe = job.config.recipe
    seed_forward(part.images.device, recipe.seed, *place)
    with autocast(part.images.device, recipe.precision):
        logits = model(part.images)
    losses = F.cross_entropy(
        logits.float(),
        part.targets,
        weight=job.class_weights,
        reduction="none",
        label_smoothing=recipe.label_smoothing,
    )
    return (losses * part.weights).sum()


def scale_gradient(model: nn.Module, factor: float) -> None:
    """Multiply the gradient, for a batch of which some images could not be read."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def clip_gradient(model: nn.Module, clip: float) -> float:
    """Scale the gradient to norm `clip` where it is longer; its norm before. 0 does not clip."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if clip:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm)
    return float(whole(norm))


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """bf16 where it was chosen; parameters, loss and optimizer stay in float32."""
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def seed_forward(device: torch.device, *place: int) -> None:
    """Seed PyTorch's generators by a hash of the place in the run, as cheaply as it goes."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        getattr(torch, device.type).manual_seed(seed)
