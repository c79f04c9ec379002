"""A fixed set of training images, from which some models take statistics.

A model that says `takes_statistics` is given them by `initialise_from(images)` before its first
step, and by `calibrate(images)` before each evaluation (see `models.pixel_resnet`). The set depends
on the data alone, so it is the same for every process and after a resume.
"""

from typing import Any

import torch
from torch import Tensor, nn

from regard.data.dataset import Data, readable
from regard.data.preprocess import Preprocess

COUNT = 2048


def reference_images(model: nn.Module, data: Data, preprocess: Preprocess) -> Tensor | None:
    """Up to `COUNT` training images (b, c, h, w) from all over; None if the model wants none."""
    if not takes_statistics(model):
        return None
    split = data.splits["train"]
    positions = split.sample(COUNT).tolist() if split.source.streamed else spread(len(split))
    # What cannot be read is named by the scan, and by the batch that meets it.
    return torch.stack([preprocess(picture) for _, picture in readable(split, positions)])


def spread(images: int) -> list[int]:
    """At most `COUNT` positions, evenly over all: images often stand class by class."""
    some = min(images, COUNT)
    return [i * images // some for i in range(some)]


def takes_statistics(model: nn.Module) -> bool:
    """Whether the model must be given images before training and before evaluation."""
    return bool(getattr(model, "takes_statistics", False))


def initialise(model: Any, reference: Tensor | None) -> None:
    """Let a model that starts from statistics of images take them."""
    if takes_statistics(model):
        model.initialise_from(reference)


def calibrate(model: Any, reference: Tensor | None) -> None:
    """Let a model that is evaluated by statistics of images take them."""
    if takes_statistics(model):
        model.calibrate(reference)
