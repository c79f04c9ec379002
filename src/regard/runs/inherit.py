"""Starting from another run: --init."""

from typing import Any

import torch
from torch import nn

from regard.errors import InputError
from regard.files import read_weights
from regard.images import Data
from regard.models.create import create
from regard.runs.config import RunConfig
from regard.runs.folder import RunFolder


def what_it_keeps(source: RunConfig) -> dict[str, Any]:
    """What a run given by --init decides about one that starts from its weights."""
    names = ("model", "model_options", "image_size", "fit")
    return {name: getattr(source.recipe, name) for name in names}


def start_from(model: nn.Module, origin: RunFolder, data: Data) -> str:
    """Load a run's weights; a classifier of other classes stays new. What was done, in words."""
    source = origin.config()
    weights = read_weights(origin.weights_file)
    same = source.classes == data.classes
    skipped = set() if same else classifier_keys(source.model)
    own = model.state_dict()
    for name, tensor in own.items():
        if name not in skipped and (name not in weights or weights[name].shape != tensor.shape):
            raise InputError(
                f"the weights of {origin} do not fit this model: {name} is "
                f"{tuple(tensor.shape)} here; leave out --model and --model-options, so that they "
                "are the run's"
            )
    model.load_state_dict({n: own[n] if n in skipped else weights[n] for n in own})
    head = (
        "its classifier too" if same else f"with a new classifier for {len(data.classes)} classes"
    )
    return f"starting from the weights of {origin}, {head}"


def classifier_keys(arguments: dict[str, Any]) -> set[str]:
    """The weights whose shape follows the number of classes."""
    with torch.device("meta"):
        one = create(**arguments).state_dict()
        more = create(**{**arguments, "num_classes": arguments["num_classes"] + 1}).state_dict()
    return {name for name in one if one[name].shape != more[name].shape}
