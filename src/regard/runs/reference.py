"""A fixed set of training images, from which some models take statistics.

A model with `initialise_from(images)` is given them before its first step, and one with
`calibrate(images)` before each evaluation (see `models.pixel_resnet`). The set depends on the
data alone, so it is the same for every process and after a resume.
"""

import itertools

import torch
from torch import Tensor, nn

from regard.images import Data, Preprocess, readable

COUNT = 2048


def reference_images(model: nn.Module, data: Data, preprocess: Preprocess) -> Tensor | None:
    """Up to `COUNT` training images (b, c, h, w) from all over; None if the model wants none."""
    if not (hasattr(model, "initialise_from") or hasattr(model, "calibrate")):
        return None
    split = data.splits["train"]
    spread = range(0, len(split), max(1, len(split) // COUNT))
    positions = split.sample(COUNT).tolist() if split.source.streamed else spread
    # What cannot be read is named by the scan, and by the batch that meets it.
    found = itertools.islice(readable(split, positions), COUNT)
    return torch.stack([preprocess(picture) for _, picture in found])
