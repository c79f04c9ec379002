"""Answers averaged over each image and its mirror image."""

import torch
from torch import Tensor


def with_mirrored(images: Tensor) -> Tensor:
    """Images (b, c, h, w), then the same mirrored left to right: (2b, c, h, w)."""
    return torch.cat([images, images.flip(-1)])


def mean_of_mirrored(logits: Tensor) -> Tensor:
    """The mean (b, k) over each image and its mirror image, of what `with_mirrored` led to."""
    return logits.unflatten(0, (2, -1)).mean(dim=0)
