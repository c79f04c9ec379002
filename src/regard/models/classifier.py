"""The statistics by which a model's batch norms norm outside training."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.layers.checks import check_finite

CALIBRATION_BATCH = 256


@torch.no_grad()
def take_statistics(model: nn.Module, images: Tensor, answer: Callable[[Tensor], Tensor]) -> None:
    """Take the norms' statistics for evaluation from images (b, c, h, w), which `answer` runs.

    Batches of about 256 are normed by themselves, as in training, and their means and variances
    averaged (Wu & Johnson 2021, arXiv 2105.07576). The result depends on weights and images only.
    """
    check_finite(images)
    if len(images) < 2:
        raise InputError(f"{len(images)} images to take statistics from; give 2 or more")
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta, training = [norm.momentum for norm in norms], model.training
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain average over calls
    model.train()
    try:
        for chunk in images.tensor_split(math.ceil(len(images) / CALIBRATION_BATCH)):
            answer(chunk)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        model.train(training)


def check_batch(model: nn.Module, images: Tensor) -> None:
    """Refuse a training batch of one image, which a batch norm cannot norm."""
    if model.training and images.shape[0] < 2:
        raise InputError(
            f"a batch of {images.shape[0]} in training; batch norm needs 2 images or more. "
            "Raise the microbatch, or call model.eval() to predict"
        )


# Answers averaged over each image and its mirror image.


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
