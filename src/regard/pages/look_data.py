"""What one picture's look page is made of: attention, rollout, relevance, prediction."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.data.preprocess import Geometry
from regard.errors import InputError
from regard.interpret.maps import rollout
from regard.interpret.record import record
from regard.interpret.recording import Recording
from regard.interpret.relevance import class_relevance


@dataclass(frozen=True)
class Picture:
    """An original picture uint8 (c, H, W), the model's input (c, h, w), and how they relate."""

    name: str
    original: Tensor
    input: Tensor
    geometry: Geometry

    def box(self) -> tuple[float, float, float, float]:
        """Where the input lies on the original: top, left, bottom, right, in its pixels."""
        corners = torch.tensor([(0, 0), self.input.shape[-2:]], dtype=torch.float64)
        (top, left), (bottom, right) = self.geometry.to_picture(corners).tolist()
        return top, left, bottom, right


@dataclass(frozen=True)
class LayerMaps:
    """Weights (g, n, n) between the places of a grid (h, w), row-major, of one attention."""

    name: str
    grid: tuple[int, int]
    weights: Tensor


@dataclass(frozen=True)
class Look:
    """Everything a look page shows of one picture.

    `rollout` has one head, from the output of each layer; empty where the layers' grids differ.
    `relevance` maps (h, w) by class name; `without` says why there is none.
    """

    picture: Picture
    layers: tuple[LayerMaps, ...]
    rollout: tuple[LayerMaps, ...]
    relevance: dict[str, Tensor]
    chances: tuple[tuple[str, float], ...]
    without: str = ""


def look_at(
    model: nn.Module,
    picture: Picture,
    classes: Sequence[str],
    *,
    wanted: Sequence[str] = (),
    likeliest: int = 3,
    layers: Sequence[str | int] | None = None,
) -> Look:
    """Record one picture through a classifier.

    Args:
        model: any classifier that `record` can read, in eval mode.
        picture: what to look at.
        classes: the class names, in the order of the logits.
        wanted: classes whose relevance is wanted besides the `likeliest` few.
        layers: which attentions, as `record` takes them; None for all.

    Raises:
        InputError: for an unknown class, or attention that forms no map of the image.
    """
    for name in wanted:
        if name not in classes:
            raise InputError(
                f"there is no class {name!r}; the model knows {', '.join(map(repr, classes))}"
            )
    device = next(model.parameters(), picture.input).device
    images = picture.input.unsqueeze(0).to(device)
    with torch.no_grad(), record(model, layers=layers) as seen:
        logits = model(images)
    if logits.shape != (1, len(classes)):
        raise InputError(
            f"the model returned {tuple(logits.shape)} for {len(classes)} class names; (1, "
            f"{len(classes)}) is needed"
        )
    chances = logits[0].float().softmax(0).cpu()
    order = chances.argsort(descending=True, stable=True).tolist()
    shown = tuple((classes[i], float(chances[i])) for i in order[: max(5, likeliest)])
    chosen = [*(classes.index(name) for name in wanted), *order[:likeliest]]
    relevance, without = _relevance(model, images, classes, list(dict.fromkeys(chosen)))
    return Look(picture, _layers(seen), _rollout(seen), relevance, shown, without)


def _relevance(
    model: nn.Module, images: Tensor, classes: Sequence[str], chosen: list[int]
) -> tuple[dict[str, Tensor], str]:
    """Maps by class, or why there are none. One picture a class, so that one backward does all."""
    repeated = images.expand(len(chosen), *images.shape[1:])
    try:
        found = class_relevance(model, repeated, torch.tensor(chosen))
    except InputError as error:
        return {}, str(error)
    maps = found.maps.float().cpu()
    return {classes[index]: maps[i] for i, index in enumerate(chosen)}, ""


def _layers(seen: Recording) -> tuple[LayerMaps, ...]:
    result = []
    for attention in seen.layers():
        grid = attention.keys.need_grid()
        if attention.queries != attention.keys:
            continue  # a pool over the grid has no place to look from
        places = attention.keys.places()
        weights = attention.need("weights")[0][:, places, places].float().cpu()
        result.append(LayerMaps(attention.name, grid, weights))
    if not result:
        raise InputError("no attention is among the places of an image; nothing can be shown")
    return tuple(result)


def _rollout(seen: Recording) -> tuple[LayerMaps, ...]:
    """Rollout through the first layer, the first two, …; nothing where grids differ."""
    layers = [a for a in seen.layers() if a.queries == a.keys]
    if len({a.keys for a in layers}) != 1:
        return ()
    keys = layers[0].keys
    places = keys.places()
    result = []
    for count, attention in enumerate(layers, start=1):
        reached = rollout([a.need("weights").float() for a in layers[:count]])
        weights = reached[:, places, places].cpu()
        result.append(LayerMaps(attention.name, keys.need_grid(), weights))
    return tuple(result)
