"""Augmentation: a training picture changed at random, the same way whenever it is asked again.

Every draw is keyed by (seed, epoch, image index), those of Mixup and CutMix by (seed, step,
microbatch): see `keys`.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.counter_rng import CROP, ERASE, FLIP, MIX, POLICY, SHIFT, contained, key, uniform
from regard.data.preprocess import Box, Geometry, Preprocess
from regard.errors import InputError, MissingExtraError, nearest

FLIPS = ("none", "random", "alternate")
MOST_OPERATIONS = 100
MOST_SHIFT = 10_000


@dataclass(frozen=True)
class Augment:
    """What is done to training pictures, in this order.

    `crop_scale` (low, high): a box of that share of the picture's area and of an aspect ratio
    within 3/4..4/3 of its own, resized to the input (random resized crop; Szegedy et al. 2015);
    () fits the picture as evaluation does. `randaugment` (n, m): n operations of magnitude m of
    torchvision's 31 (Cubuk et al. 2020). `flip`: "random" mirrors each picture with probability
    1/2, "alternate" draws once and mirrors in every other epoch (airbench), so that every two
    epochs show both. `shift`: translation by up to so many pixels each way, uniformly, the border
    mirrored. `erase`: the probability of a box of 2-33% of the area being set to the mean (random
    erasing; Zhong et al. 2017). `mixup` and `cutmix`: the alpha of the Beta distribution (Zhang
    et al. 2018; Yun et al. 2019), 0 for never; with both, each microbatch takes one at even odds.
    """

    crop_scale: tuple[float, ...] = ()
    randaugment: tuple[int, ...] = ()
    flip: str = "none"
    shift: int = 0
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        if self.crop_scale and not (
            len(self.crop_scale) == 2 and 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1
        ):
            raise InputError(
                f"crop_scale is {self.crop_scale}; give (low, high), 0 < low <= high <= 1"
            )
        if self.randaugment and not (
            len(self.randaugment) == 2
            and 1 <= self.randaugment[0] <= MOST_OPERATIONS
            and 0 <= self.randaugment[1] <= 30
        ):
            raise InputError(
                f"randaugment is {self.randaugment}; give (operations, magnitude): "
                f"1..{MOST_OPERATIONS}, and 0..30"
            )
        if self.flip not in FLIPS:
            raise InputError(f"flip is {self.flip!r}; {nearest(self.flip, FLIPS)}")
        if not 0 <= self.shift <= MOST_SHIFT:
            raise InputError(f"shift is {self.shift}; give pixels, 0 to {MOST_SHIFT:,}")
        if not 0 <= self.erase <= 1:
            raise InputError(f"erase is {self.erase}; give a probability, 0..1")
        if not (0 <= self.mixup < math.inf and 0 <= self.cutmix < math.inf):
            raise InputError(
                f"mixup is {self.mixup} and cutmix {self.cutmix}; give alphas, 0 or more"
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` takes it back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Augment":
        """Rebuild from `to_dict`'s result."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise InputError(f"there is no augmentation {name!r}; {nearest(name, known)}")
        arguments: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**arguments)


def load_picture(
    picture: Tensor, preprocess: Preprocess, augment: Augment, seed: int, epoch: int, index: int
) -> Tensor:
    """One training picture at the input's size, not yet normalised: (c, h, w) in 0..255.

    Holds what is done to each picture by itself: the random crop and RandAugment.
    """
    if augment.crop_scale:
        box = _crop_box(picture, augment.crop_scale, preprocess, seed, epoch, index)
        geometry = Geometry(box, Box(0, 0, *preprocess.size))
        fitted = preprocess.place(picture, geometry)
    else:
        fitted = preprocess.fitted(picture)
    if augment.randaugment:
        whole = fitted.round().clamp(0, 255).to(torch.uint8)
        with contained(int(key(seed, POLICY, epoch, index))):
            fitted = _randaugment(augment.randaugment)(whole).to(torch.float32)
    return fitted


def _crop_box(
    picture: Tensor,
    scale: tuple[float, ...],
    preprocess: Preprocess,
    seed: int,
    epoch: int,
    index: int,
) -> Box:
    """A box of a random share of what the fit would use, of nearly the input's shape."""
    height, width = picture.shape[-2:]
    h, w = preprocess.size
    area, ratio, y, x = (float(uniform(seed, CROP, epoch, index, draw)) for draw in range(4))
    share = scale[0] + area * (scale[1] - scale[0])
    # log-uniform within 3/4 .. 4/3 of the input's own width : height
    aspect = w / h * math.exp((2 * ratio - 1) * math.log(4 / 3))
    box_h = math.sqrt(share * height * width / aspect)
    box_w = box_h * aspect
    shrink = min(1.0, height / box_h, width / box_w)
    rows = min(height, max(1, round(box_h * shrink)))
    columns = min(width, max(1, round(box_w * shrink)))
    top = int(y * (height - rows + 1))
    left = int(x * (width - columns + 1))
    return Box(top, left, rows, columns)


def _randaugment(setting: tuple[int, ...]) -> Any:
    try:
        from torchvision.transforms import v2
    except ImportError:
        raise MissingExtraError("torchvision", "train", "RandAugment") from None
    operations, magnitude = setting
    return v2.RandAugment(operations, magnitude)


def flip_and_shift(
    images: Tensor, augment: Augment, seed: int, epochs: np.ndarray, indices: np.ndarray
) -> Tensor:
    """Mirror and translate each of (b, c, h, w) by its own draws."""
    if augment.flip == "none" and augment.shift == 0:
        return images
    b, _, h, w = images.shape
    rows = np.broadcast_to(np.arange(h), (b, h))
    columns = np.broadcast_to(np.arange(w), (b, w))
    if augment.shift:
        reach = 2 * augment.shift + 1
        down, right = (
            (uniform(seed, SHIFT, epochs, indices, draw) * reach).astype(np.int64) - augment.shift
            for draw in range(2)
        )
        rows = _mirrored(rows - down[:, None], h)
        columns = _mirrored(columns - right[:, None], w)
    if augment.flip == "random":
        mirror = uniform(seed, FLIP, epochs, indices) < 0.5
    else:
        first = (uniform(seed, FLIP, indices) < 0.5).astype(np.int64)
        mirror = (first + epochs) % 2 == 1
    if augment.flip != "none":
        columns = np.where(mirror[:, None], columns[:, ::-1], columns)
    places = torch.from_numpy(rows[:, :, None] * w + columns[:, None, :])
    # b c h w -> b c (h w), picked by b 1 (h w)
    picked = images.flatten(2).gather(2, places.view(b, 1, h * w).expand(-1, images.shape[1], -1))
    return picked.view(images.shape)


def _mirrored(places: np.ndarray, size: int) -> np.ndarray:
    """Places outside 0 .. size - 1 reflected at the border pixels, which are not repeated."""
    if size == 1:
        return np.zeros_like(places)
    period = 2 * (size - 1)
    folded = places % period
    return np.minimum(folded, period - folded)


def erase_boxes(
    images: Tensor, probability: float, seed: int, epochs: np.ndarray, indices: np.ndarray
) -> Tensor:
    """Set a box of 2-33% of the area to 0, the mean, in each picture that draws it."""
    if probability == 0:
        return images
    b, _, h, w = images.shape
    hit, share, ratio, y, x = (uniform(seed, ERASE, epochs, indices, draw) for draw in range(5))
    area = (0.02 + share * (0.33 - 0.02)) * h * w
    # log-uniform within 0.3 .. 1 / 0.3
    aspect = np.exp((2 * ratio - 1) * math.log(1 / 0.3))
    rows = np.clip(np.rint(np.sqrt(area / aspect)), 1, h)
    columns = np.clip(np.rint(np.sqrt(area * aspect)), 1, w)
    top = np.floor(y * (h - rows + 1))[:, None]
    left = np.floor(x * (w - columns + 1))[:, None]
    in_rows = (np.arange(h) >= top) & (np.arange(h) < top + rows[:, None])
    in_columns = (np.arange(w) >= left) & (np.arange(w) < left + columns[:, None])
    gone = in_rows[:, :, None] & in_columns[:, None, :] & (hit < probability)[:, None, None]
    return images.masked_fill(torch.from_numpy(gone).view(b, 1, h, w), 0.0)


def mix(
    images: Tensor,
    targets: Tensor,
    weights: Tensor,
    augment: Augment,
    seed: int,
    step: int,
    microbatch: int,
) -> tuple[Tensor, Tensor]:
    """Mixup or CutMix within one microbatch: images (b, c, h, w), targets (b, k).

    Partners are a random permutation of the microbatch. A picture whose partner could not be read
    (weight 0) stays as it is.
    """
    if augment.mixup == 0 and augment.cutmix == 0:
        return images, targets
    b, _, h, w = images.shape
    draws = np.random.Generator(np.random.PCG64(int(key(seed, MIX, step, microbatch))))
    use_cutmix = augment.mixup == 0 or (augment.cutmix > 0 and draws.random() < 0.5)
    alpha = augment.cutmix if use_cutmix else augment.mixup
    share = float(draws.beta(alpha, alpha))
    partner = torch.from_numpy(draws.permutation(b))
    alone = weights[partner] == 0
    if use_cutmix:
        rows, columns = round(h * math.sqrt(1 - share)), round(w * math.sqrt(1 - share))
        top = int(draws.integers(0, h - rows + 1))
        left = int(draws.integers(0, w - columns + 1))
        share = 1 - rows * columns / (h * w)
        mixed = images.clone()
        mixed[:, :, top : top + rows, left : left + columns] = images[
            partner, :, top : top + rows, left : left + columns
        ]
    else:
        mixed = share * images + (1 - share) * images[partner]
    mixed_targets = share * targets + (1 - share) * targets[partner]
    return (
        torch.where(alone.view(b, 1, 1, 1), images, mixed),
        torch.where(alone.view(b, 1), targets, mixed_targets),
    )
