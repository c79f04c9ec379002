"""The training loop."""

import hashlib
import math
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.images import Batch, Data, TrainBatches
from regard.runs.checkpoint import Checkpoints
from regard.runs.config import RunConfig
from regard.runs.evaluate import predict_split
from regard.runs.folder import RunFolder, RunStopped
from regard.runs.log import MetricsLog
from regard.runs.optimizer import set_rate
from regard.runs.processes import Processes
from regard.runs.reporter import Reporter
from regard.runs.schedule import rate
from regard.runs.state import TrainState, whole
from regard.runs.stop import Interrupted, StopSignal
from regard.runs.watch import LossWatch, NotFinite, diagnose


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
    checkpoints: Checkpoints
    log: MetricsLog
    reporter: Reporter


def run(job: Job) -> None:
    """Train from the state's step to the recipe's last, evaluating and saving on the way."""
    recipe, state, progress = job.config.recipe, job.state, job.state.progress
    every = evaluation_interval(job)
    watch, clock, saved = LossWatch(), time.monotonic(), time.monotonic()
    state.model.train()
    batches = job.batches.start(progress.step)
    with StopSignal() as stop:
        while progress.step < recipe.steps:
            batch = next(batches).to(job.processes.device)
            lr = recipe.lr * rate(progress.step, recipe.steps, recipe.warmup)
            set_rate(state.optimizers, lr)
            sums = accumulate(job, batch)
            late = job.processes.main and time.monotonic() - saved > 60 * recipe.save_every
            loss_sum, weight, signals, due = job.processes.sum([*sums.tolist(), stop.number, late])
            loss = loss_sum / max(weight, 1e-12)
            if 0 < weight < recipe.batch_size:
                scale_gradient(state.model, recipe.batch_size / weight)
            norm = clip_gradient(state.model, recipe.clip)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise not_finite(job, batch)
            if weight < recipe.batch_size / 2:
                raise unreadable(job, batch)

            for optimizer in state.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            progress.step += 1
            state.update_ema()
            now = time.monotonic()
            progress.seconds, clock = progress.seconds + now - clock, now
            job.log.step(progress, loss, lr, norm, batch.unreadable)
            if watch.check(loss):
                job.log.notice(
                    progress.step, f"the loss leapt to {loss:.4g} at step {progress.step}"
                )

            if progress.step % every == 0 or progress.step == recipe.steps:
                evaluate_now(job)
                due = True
            if due or signals:
                job.log.flush()  # first: no step of a checkpoint may lack its line
                job.checkpoints.save(state)
                saved = time.monotonic()
            if signals and progress.step < recipe.steps:
                job.checkpoints.wait()
                raise interrupted(job, stop.number or signal.SIGTERM)
    job.checkpoints.wait()


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


def evaluate_now(job: Job) -> None:
    """Measure on the val split, note the best, and write the weights that evaluation uses."""
    state, progress = job.state, job.state.progress
    with state.evaluated_weights():
        calibrate = getattr(state.model, "calibrate", None)
        if calibrate is not None:
            calibrate(job.reference)
        found = predict_split(
            state.model, job.data, "val", job.config, job.processes.device, job.processes
        )
        numbers = found.brief()
        key = (numbers["accuracy"], -numbers["log_loss"])
        better = key > (progress.best_accuracy, -progress.best_loss)
        if better:
            progress.best_step = progress.step
            progress.best_accuracy, progress.best_loss = key[0], -key[1]
        if better or state.ema:
            weights = {name: whole(tensor) for name, tensor in state.model.state_dict().items()}
            if job.processes.main:
                with job.folder.writing():
                    job.folder.write_weights(weights, job.config, progress.step)
    job.log.evaluation(progress, numbers)


def evaluation_interval(job: Job) -> int:
    """Steps between evaluations."""
    recipe = job.config.recipe
    steps_an_epoch = len(job.data.splits["train"]) / recipe.batch_size
    return max(1, round(recipe.eval_every * steps_an_epoch))


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
    command = job.folder.resume_command("--lr", f"{recipe.lr / 3:.2g}")
    return NotFinite(
        f"the loss or its gradient at step {progress.step + 1} is not finite; {cause}. Nothing was "
        f"overwritten. {job.folder.way_back()}; {command} goes on at a third of the rate"
    )


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
