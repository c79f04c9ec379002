"""Answers averaged over each image and its mirror image."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def answered(model: Any, answer: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """answer(images), as a model with `test_flips` gives it.

    Outside training its logits are the mean over each image and the same mirrored left to right,
    which go through as one batch (2b, c, h, w). Features, where num_classes is None, stay as they
    are.
    """
    if not model.test_flips or model.training or model.num_classes is None:
        return answer(images)
    both = answer(torch.cat([images, images.flip(-1)]))
    return both.unflatten(0, (2, -1)).mean(dim=0)
