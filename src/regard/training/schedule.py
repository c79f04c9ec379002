"""The learning rate as a function of the step."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from statistics import fmean

from torch import nn
from torch.nn import functional as F

from regard.data.batches import Batch
from regard.training.config import Recipe


def rate(step: int, steps: int, warmup: float, schedule: str = "cosine") -> float:
    """The factor on the peak rate at `step` of `steps`, counted from 0.

    A line from 1/w to 1 over the first w = ⌈warmup · steps⌉ steps; then, with
    t = (step - w) / (steps - w), "cosine": ½ (1 + cos πt), or "linear": 1 - t. Both would reach 0
    one step after the last.
    """
    rising = math.ceil(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    t = (step - rising) / (steps - rising)
    return 1 - t if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * t))


# Image sizes that grow over a training run.


GROWING = 0.75  # of the steps are spent below the full size


def training_size(recipe: Recipe, step: int, multiple: tuple[int, int]) -> tuple[int, int]:
    """The height and width to train at in `step` of the recipe's steps.

    From `start_size` to `image_size` in a straight line over the first three quarters of the
    steps, each side rounded down to a multiple; the last quarter is at the full size, whose
    statistics evaluation will meet.
    """
    if recipe.start_size is None:
        return recipe.image_size
    share = min(1.0, step / (GROWING * recipe.steps))
    h, w = (
        full if share == 1 else side_at(start, full, share, unit)
        for start, full, unit in zip(recipe.start_size, recipe.image_size, multiple, strict=True)
    )
    return h, w


def side_at(start: int, full: int, share: float, unit: int) -> int:
    """A side `share` of the way from `start` to `full`, a multiple of `unit` and at least that."""
    side = math.floor(start + share * (full - start))
    return max(unit, side // unit * unit)


def mean_step(recipe: Recipe, multiple: tuple[int, int], first: float, last: float) -> float:
    """The mean time of a step, where it grows in line with the area from `first` to `last`.

    `first` and `last` are the times at the first and at the full size.
    """
    smallest = math.prod(training_size(recipe, 0, multiple))
    largest = math.prod(recipe.image_size)
    if smallest == largest:
        return last
    share = (fmean(areas(recipe, multiple)) - smallest) / (largest - smallest)
    return first + share * (last - first)


def work_done(recipe: Recipe, multiple: tuple[int, int]) -> Callable[[int], float]:
    """How much of the work is done after so many steps: the pixels of an image, added up.

    By it the time that is left is foretold while images grow.
    """
    if recipe.start_size is None:
        return float
    return list(itertools.accumulate(areas(recipe, multiple), initial=0)).__getitem__


def areas(recipe: Recipe, multiple: tuple[int, int]) -> Iterator[int]:
    """The pixels of an image in each step."""
    return (math.prod(training_size(recipe, s, multiple)) for s in range(recipe.steps))


def size_multiple(model: nn.Module) -> tuple[int, int]:
    """What a model's height and width must be multiples of: its patch, else 2 pixels."""
    patch = getattr(model, "patch_size", None)
    return patch if isinstance(patch, tuple) else (2, 2)


def brought_to(batch: Batch, size: tuple[int, int]) -> Batch:
    """The batch with its images resized, by antialiased interpolation, to (h, w)."""
    if batch.images.shape[-2:] == size:
        return batch
    images = F.interpolate(batch.images, size, mode="bilinear", antialias=True)
    return dataclasses.replace(batch, images=images)
