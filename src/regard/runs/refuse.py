"""Requests for a run that cannot be meant."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from regard.errors import InputError
from regard.models.pixel_resnet import PixelResNet
from regard.runs.config import Recipe
from regard.runs.reference import takes_statistics
from regard.runs.sizes import size_multiple

# Options of the models that other parts of a request decide.
OWN = {
    "name": "--model",
    "num_classes": "the data",
    "channels": "--channels",
    "image_size": "--image-size",
    "test_flips": "--test-flips",
}


def refuse_own(model_options: Mapping[str, Any]) -> None:
    """Refuse options of the model that something else of the request decides."""
    for name in model_options:
        if name in OWN:
            raise InputError(f"--model-options gives {name}, which {OWN[name]} decides; use that")


def refuse_unfit(recipe: Recipe, model: nn.Module) -> None:
    """Refuse a recipe that this model cannot be trained by."""
    refuse_start_size(recipe, model)
    refuse_single_images(recipe, model)
    refuse_optimizer(recipe, model)


def refuse_start_size(recipe: Recipe, model: nn.Module) -> None:
    """Refuse a first size that the model cannot cut into its patches."""
    unit = size_multiple(model)
    start = recipe.start_size
    if start is not None and (start[0] % unit[0] or start[1] % unit[1]):
        raise InputError(
            f"start_size is {start[0]} {start[1]}; this model takes multiples of {unit[0]} and "
            f"{unit[1]}"
        )


def refuse_single_images(recipe: Recipe, model: nn.Module) -> None:
    """Refuse microbatches of one image for a model whose norms take statistics over a batch."""
    if takes_statistics(model) and recipe.microbatch < 2:
        raise InputError(
            f"a batch of {recipe.batch_size} in microbatches of {recipe.microbatch}; the batch "
            "norms of this model need 2 images or more at a time: raise --batch-size or "
            "--microbatch"
        )


def refuse_optimizer(recipe: Recipe, model: nn.Module) -> None:
    """Refuse a model that the optimizer has no rates for."""
    if recipe.optimizer == "muon-sgd" and not isinstance(model, PixelResNet):
        raise InputError(
            "the optimizer muon-sgd has rates for PixelResNet alone, and this is a "
            f"{type(model).__name__}; give --optimizer muon or adamw"
        )


def refuse_inside(out: Path, data: str) -> None:
    """Refuse a run folder among the training images, which it would become a class of."""
    if data.strip() and Path(data).is_dir() and out.resolve().is_relative_to(Path(data).resolve()):
        raise InputError(
            f"{out} lies in the training data {data}, where it would be taken for pictures; give "
            "an --out outside"
        )
