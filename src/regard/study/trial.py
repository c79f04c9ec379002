"""The images of a study, decoded once and shared by all its runs through one file."""

import functools
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regard._io import atomic_write
from regard.data.counter_rng import SPLIT, key, permutation
from regard.data.dataset import Data, Split, readable
from regard.data.preprocess import Preprocess
from regard.errors import InputError, counted
from regard.interpret.health import attention_health
from regard.study.plan import Run, Settings, build
from regard.training.calibration import calibrate, initialise, spread, takes_statistics
from regard.training.optimizers import build_optimizers, set_rate
from regard.training.schedule import rate


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images as the model's input shows them, uint8 (n, c, h, w), and labels (n,) int64."""

    images: Tensor
    labels: Tensor
    val_images: Tensor
    val_labels: Tensor

    def to(self, device: torch.device) -> "Pictures":
        return Pictures(*(tensor.to(device) for tensor in vars(self).values()))

    @property
    def chance(self) -> float:
        """Share of the most frequent class among the held-out images."""
        return float(torch.bincount(self.val_labels).max() / len(self.val_labels))

    def save(self, path: Path) -> None:
        """One archive of plain arrays."""
        arrays = {name: tensor.numpy() for name, tensor in vars(self).items()}
        with atomic_write(path) as part, part.open("wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> "Pictures":
        with np.load(path, allow_pickle=False) as file:
            return cls(**{name: torch.from_numpy(file[name]) for name in file.files})


def read_pictures(
    data: Data, preprocess: Preprocess, most: int, say: Callable[[str], None]
) -> Pictures:
    """At most `most` training and as many held-out images of `data`.

    Which ones depends on nothing but their number, so that every study takes the same. Images
    that cannot be read are left out, and how many is said.
    """
    parts: list[Tensor] = []
    for title in ("train", "val"):
        images, labels, lost = read_split(data.splits[title], preprocess, most)
        if lost:
            say(f"{data.name}: {counted(lost, f'{title} image')} could not be read and left out")
        if not len(images):
            raise InputError(f"no {title} image of {data.name} could be read; study other data")
        parts += [images, labels]
    return Pictures(*parts)


def read_split(split: Split, preprocess: Preprocess, most: int) -> tuple[Tensor, Tensor, int]:
    """Images, labels and the number of images that could not be read."""
    order = np.argsort(key(SPLIT, np.arange(len(split))), kind="stable")[:most]
    images, labels = [], []
    for i, picture in readable(split, np.sort(order).tolist()):
        images.append(preprocess.shown(picture))
        labels.append(int(split.labels[i]))
    shape = (0, preprocess.channels, *preprocess.size)
    stacked = torch.stack(images) if images else torch.empty(shape, dtype=torch.uint8)
    return stacked, torch.tensor(labels, dtype=torch.int64), len(order) - len(images)


# One run of a study, from its first step to its figures.
#
# The loop is a study's own, not that of `regard train`: a study makes hundreds of runs of a few
# seconds each on images held in memory, so it has no checkpoints, workers, augmentation or
# processes. Optimizers, schedule and order of the images are those of `regard train`. Gradients are
# not clipped, which would hide what is being studied.


#: Measurements of attention and gradient, and of held-out accuracy, in each run.
POINTS = 20
CHECKS = 10
MOST_CHECKED = 512  # held-out images looked at during training; at the end all are


def trial(
    run: Run,
    settings: Settings,
    pictures: Pictures,
    tick: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:
    """Train one model and return what was measured, JSON-ready.

    `pictures` lie on the device to compute on. `tick` is told the number of finished steps now
    and then. A run whose loss is no longer finite stops at the next measurement: its final loss
    and accuracy are None and `diverged_at` is the first such step, counted from 1.
    """
    began = time.perf_counter()
    device = pictures.images.device
    preprocess = Preprocess.from_dict(settings.preprocess)
    model = build(run.form, settings.model, run.seed).to(device).train()
    reference = reference_of(model, pictures, preprocess)
    initialise(model, reference)
    optimizers = build_optimizers(model, run.optimizer, run.rate, settings.weight_decay)
    losses = torch.full((settings.steps,), math.nan, device=device)
    points: list[dict[str, Any]] = []
    checks: list[dict[str, Any]] = []
    for step in range(settings.steps):
        where = batch_at(step, len(pictures.labels), settings.batch_size, run.seed)
        index = torch.from_numpy(where).to(device)
        images = preprocess.normalise(pictures.images[index])
        labels = pictures.labels[index]
        set_rate(optimizers, run.rate * rate(step, settings.steps, settings.warmup))
        if due(step, settings.steps, POINTS):
            loss, found = measured(model, images, labels)
            points.append({"step": step + 1, **found})
        else:
            loss = cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        losses[step] = loss.detach()
        if due(step, settings.steps, POINTS):
            tick(step + 1)
            if not math.isfinite(losses[step].item()):
                break
        if due(step, settings.steps, CHECKS):
            some = (pictures.val_images[:MOST_CHECKED], pictures.val_labels[:MOST_CHECKED])
            calibrate(model, reference)
            accuracy, held_out_loss = held_out(model, preprocess, *some)
            checks.append({"step": step + 1, "accuracy": accuracy, "loss": finite(held_out_loss)})
    return {
        **vars(run),
        **outcome(model, preprocess, pictures, losses, reference),
        "losses": smoothed(losses.tolist()),
        "points": points,
        "checks": checks,
        "seconds": round(time.perf_counter() - began, 3),
    }


def reference_of(model: nn.Module, pictures: Pictures, preprocess: Preprocess) -> Tensor | None:
    """Training images from all over, for a model that takes statistics; else None."""
    if not takes_statistics(model):
        return None
    return preprocess.normalise(pictures.images[spread(len(pictures.images))])


def batch_at(step: int, images: int, size: int, seed: int) -> np.ndarray:
    """Positions of one step's images, as `TrainBatches` takes them: [sB, (s+1)B) of the epochs."""
    positions = np.arange(step * size, (step + 1) * size)
    epochs = positions // images
    places = positions % images
    return np.concatenate([order(images, seed, e)[places[epochs == e]] for e in np.unique(epochs)])


@functools.lru_cache(maxsize=4)
def order(images: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of one epoch, kept while its steps last."""
    return permutation(images, seed, int(epoch))


def due(step: int, steps: int, times: int) -> bool:
    """Whether `step`, from 0, is one of `times` even measurements, the first and last included."""
    before = (step * (times - 1)) // max(steps - 1, 1)
    return step == 0 or before > ((step - 1) * (times - 1)) // max(steps - 1, 1)


def measured(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Forward and backward, and what is seen of attention, layer by layer, and of the gradient."""
    with attention_health(model) as health:
        loss = cross_entropy(model(images), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    layers = health.values()
    return loss, {
        "largest_logit": [finite(layer["largest_logit"]) for layer in layers],
        "entropy": [finite(layer["entropy"]) for layer in layers],
        "gradient_norm": finite(gradient_norm(model)),
    }


def gradient_norm(model: nn.Module) -> float:
    """Euclidean norm of all gradients together."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return float(nn.utils.get_total_norm(gradients))


@torch.no_grad()
def held_out(
    model: nn.Module, preprocess: Preprocess, images: Tensor, labels: Tensor
) -> tuple[float, float]:
    """Accuracy and mean loss on held-out images."""
    model.eval()
    logits = torch.cat([model(preprocess.normalise(part)) for part in images.split(256)])
    model.train()
    right = (logits.argmax(dim=1) == labels).float().mean()
    return float(right), float(cross_entropy(logits, labels))


def outcome(
    model: nn.Module,
    preprocess: Preprocess,
    pictures: Pictures,
    losses: Tensor,
    reference: Tensor | None,
) -> dict[str, Any]:
    """The losses at both ends, and the accuracy of the finished model."""
    broken = torch.nonzero(~torch.isfinite(losses)).flatten()
    result: dict[str, Any] = {
        "initial_loss": float(losses[0]),
        "final_loss": None,
        "accuracy": None,
        "held_out_loss": None,
        "diverged_at": int(broken[0]) + 1 if len(broken) else None,
    }
    if not len(broken):
        calibrate(model, reference)
        accuracy, loss = held_out(model, preprocess, pictures.val_images, pictures.val_labels)
        # The rate is almost 0 in the last tenth: it is one model, measured on many batches.
        final = float(losses[-max(1, len(losses) // 10) :].mean())
        result["final_loss"] = final
        if math.isfinite(loss):
            result |= {"accuracy": accuracy, "held_out_loss": loss}
    return result


def smoothed(losses: list[float]) -> list[dict[str, Any]]:
    """Training loss in `POINTS` means over equal stretches; None where one is not finite."""
    edges = [round(i * len(losses) / POINTS) for i in range(POINTS + 1)]
    return [
        {
            "step": (first + last + 1) / 2,
            "loss": finite(math.fsum(losses[first:last]) / (last - first)),
        }
        for first, last in itertools.pairwise(edges)
        if last > first
    ]


def finite(value: float) -> float | None:
    """The value, or None, which JSON can hold, where it is NaN or infinite."""
    return value if math.isfinite(value) else None
