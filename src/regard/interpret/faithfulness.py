"""Does a map point at what the model uses? Deletion and insertion, beside baselines."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.interpret.relevance import class_relevance


@dataclass(frozen=True)
class Curves:
    """Probability of the class, mean over images, after each share of places: (steps + 1,)."""

    share: Tensor
    deletion: Tensor
    insertion: Tensor

    @property
    def deletion_area(self) -> float:
        """Area under deletion, 0 to 1: lower is more faithful."""
        return float(torch.trapezoid(self.deletion, self.share))

    @property
    def insertion_area(self) -> float:
        """Area under insertion, 0 to 1: higher is more faithful."""
        return float(torch.trapezoid(self.insertion, self.share))


def baselines(maps: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """Maps that know nothing of the model, shaped as `maps` (b, h, w): random, and the centre."""
    b, h, w = maps.shape
    generator = torch.Generator().manual_seed(seed)
    rows = torch.linspace(-1, 1, h)[:, None] if h > 1 else torch.zeros(1, 1)
    columns = torch.linspace(-1, 1, w)[None, :] if w > 1 else torch.zeros(1, 1)
    near = -(rows**2 + columns**2)
    return {"random": torch.rand(b, h, w, generator=generator), "centre": near.expand(b, h, w)}


@torch.no_grad()
def curves(
    model: nn.Module, images: Tensor, maps: Tensor, classes: Tensor, steps: int = 14
) -> Curves:
    """Take away, or put back, the places of the input in the order of a map.

    Deletion replaces the first share of places by the mean colour (0 in normalised input),
    largest first; insertion starts from that everywhere and puts them back. After each share the
    model's probability of the class is taken. Each place is its cell of the map, h | H, w | W.

    Args:
        model: a classifier that returns logits (b, k).
        images: normalised input (b, c, H, W).
        maps: (b, h, w), larger where it matters more.
        classes: (b,).
        steps: in how many equal shares places are taken.

    Source: Petsiuk, Das, Saenko 2018 (RISE), arXiv 1806.07421, with places for pixels.
    """
    b, _, height, width = images.shape
    h, w = maps.shape[-2:]
    if maps.shape[0] != b or height % h or width % w:
        raise InputError(
            f"maps {tuple(maps.shape)} do not divide images {tuple(images.shape)} into cells"
        )
    order = maps.flatten(1).to(images.device).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1).view(b, 1, h, w)
    rank = rank.repeat_interleave(height // h, 2).repeat_interleave(width // w, 3)
    deletion, insertion = [], []
    for step in range(steps + 1):
        first = rank < round(step * h * w / steps)
        deletion.append(_probability(model, images.masked_fill(first, 0), classes))
        insertion.append(_probability(model, images.masked_fill(~first, 0), classes))
    share = torch.linspace(0, 1, steps + 1)
    return Curves(share, torch.stack(deletion).cpu(), torch.stack(insertion).cpu())


def measure(model: nn.Module, images: Tensor) -> dict[str, dict[str, float]]:
    """Areas under deletion (lower is better) and insertion (higher), mean over images (b, c, h, w).

    For the relevance of each image's likeliest class ("relevance"), and for "random" places and
    the "centre".
    """
    images = images.to(next(model.parameters(), images).device)
    found = class_relevance(model, images)
    maps = found.maps.float().cpu()
    result = {}
    for name, candidate in {"relevance": maps, **baselines(maps)}.items():
        areas = curves(model, images, candidate, found.classes)
        result[name] = {"deletion": areas.deletion_area, "insertion": areas.insertion_area}
    return result


def _probability(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    probabilities = model(images).float().softmax(1)
    return probabilities.gather(1, classes.to(images.device)[:, None]).mean()
