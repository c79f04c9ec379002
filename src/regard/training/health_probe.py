"""Attention health on the way: how sharply each layer attends, before each evaluation.

A few held-out images, the same ones throughout, go through the model that evaluation uses while
`attention_health` records it. No random number is drawn and nothing is changed, so a run with and
without this ends in the same bits.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.data.dataset import Data, readable
from regard.data.preprocess import Preprocess
from regard.errors import InputError
from regard.interpret.health import attention_health

COUNT = 8
DIGITS = 6  # significant ones that are kept

Health = dict[str, dict[str, float | None]]


@dataclass(frozen=True)
class HealthProbe:
    """Measures a model's attention on fixed images (b, c, h, w)."""

    images: Tensor

    def measure(self, model: nn.Module) -> Health:
        """What `attention_health` says of each attention, in eval mode; None for no finite number.

        `InputError` where no attention of the model can be read.
        """
        was_training = model.training
        model.eval()
        try:
            with torch.inference_mode(), attention_health(model) as health:
                model(self.images)
        finally:
            model.train(was_training)
        return {
            name: {key: rounded(value) for key, value in numbers.items()}
            for name, numbers in health.items()
        }


def rounded(value: float) -> float | None:
    """A finite number to `DIGITS` digits, as JSON can hold it."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def health_probe(
    model: Any, data: Data, preprocess: Preprocess, device: torch.device
) -> tuple[HealthProbe | None, str]:
    """A probe for this model on some of the data's val images, or None and why, in words.

    Tries it once: whether a model can be read shows only when it runs.
    """
    images = some_images(data, preprocess)
    if images is None:
        return None, "attention health is left out: no held-out image could be read"
    probe = HealthProbe(images.to(device))
    try:
        probe.measure(model)
    except InputError as error:
        return None, f"attention health is left out: {error}"
    return probe, ""


def some_images(data: Data, preprocess: Preprocess) -> Tensor | None:
    """Up to `COUNT` val images (b, c, h, w), spread evenly; None if none can be read."""
    split = data.splits["val"]
    # What cannot be read is named by the scan, and by the evaluation that meets it.
    images = [preprocess(picture) for _, picture in readable(split, split.sample(COUNT).tolist())]
    return torch.stack(images) if images else None
