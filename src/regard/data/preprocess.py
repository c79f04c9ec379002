"""A picture of any size to the model's input, and places in the input back to the picture.

Resizing is float32 bilinear interpolation with antialiasing, here and nowhere else, so training,
evaluation, prediction, export and every view agree.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.data.dataset import Split, readable
from regard.data.decode import check_channels
from regard.errors import InputError, nearest

FITS = ("stretch", "crop", "letterbox")


class Box(NamedTuple):
    """Whole pixels: rows top … top + height - 1, columns left … left + width - 1."""

    top: int
    left: int
    height: int
    width: int


class Geometry(NamedTuple):
    """The part of the picture that is used, and the part of the input that it fills."""

    source: Box
    target: Box

    def to_picture(self, places: Tensor) -> Tensor:
        """Places (…, 2) in the input, as (y, x), to places in the original picture.

        Coordinates are continuous: 0 is the outer edge of the first pixel, its centre 0.5. Places
        in a letterbox's padding fall outside the picture.
        """
        offset, scale = self._affine(places)
        return places * scale + offset

    def to_input(self, places: Tensor) -> Tensor:
        """The inverse of `to_picture`."""
        offset, scale = self._affine(places)
        return (places - offset) / scale

    def _affine(self, like: Tensor) -> tuple[Tensor, Tensor]:
        (top, left, height, width), inner = self
        scale = like.new_tensor([height / inner.height, width / inner.width])
        offset = like.new_tensor([top, left]) - like.new_tensor([inner.top, inner.left]) * scale
        return offset, scale


@dataclass(frozen=True)
class Preprocess:
    """Fit a picture to `size` (h, w) and normalise: (v / 255 - mean) / std, by channel.

    `fit`: "stretch" resizes to the size, whatever the shape; "crop" takes the largest centred
    part of the size's shape; "letterbox" resizes the whole picture to fit inside and pads with
    the mean, which is 0 after normalising. `mean` and `std` are in 0..1, one value a channel, 0.5
    unless given, which maps 0..255 onto -1..1; `statistics` measures them on training pictures.
    """

    size: tuple[int, int]
    fit: str = "stretch"
    channels: int = 3
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_channels(self.channels)
        if len(self.size) != 2 or any(side < 1 for side in self.size):
            raise InputError(f"size is {self.size}; give (height, width), each at least 1")
        if self.fit not in FITS:
            raise InputError(f"fit is {self.fit!r}; {nearest(self.fit, FITS)}")
        object.__setattr__(self, "size", tuple(int(side) for side in self.size))
        for name in ("mean", "std"):
            values = tuple(float(v) for v in getattr(self, name)) or (0.5,) * self.channels
            if len(values) != self.channels or not all(math.isfinite(v) for v in values):
                raise InputError(f"{name} is {values}; give {self.channels} finite values")
            object.__setattr__(self, name, values)
        if any(value <= 0 for value in self.std):
            raise InputError(f"std is {self.std}; every value must be above 0")

    def __call__(self, picture: Tensor) -> Tensor:
        """uint8 (c, H, W) of any size to float32 (c, h, w), fitted and normalised."""
        return self.normalise(self.fitted(picture))

    def geometry(self, height: int, width: int) -> Geometry:
        """What `fit` does to a picture of this size."""
        h, w = self.size
        whole, full = Box(0, 0, height, width), Box(0, 0, h, w)
        if self.fit == "crop":
            # the largest box with box_h : box_w = h : w
            box_h = min(height, max(1, round_ratio(width * h, w)))
            box_w = min(width, max(1, round_ratio(height * w, h)))
            top, left = (height - box_h) // 2, (width - box_w) // 2
            return Geometry(Box(top, left, box_h, box_w), full)
        if self.fit == "letterbox":
            in_h = min(h, max(1, round_ratio(height * w, width)))
            in_w = min(w, max(1, round_ratio(width * h, height)))
            return Geometry(whole, Box((h - in_h) // 2, (w - in_w) // 2, in_h, in_w))
        return Geometry(whole, full)

    def fitted(self, picture: Tensor) -> Tensor:
        """uint8 (c, H, W) to float32 (c, h, w) in 0..255, not normalised."""
        self._check(picture)
        return self.place(picture, self.geometry(*picture.shape[-2:]))

    def place(self, picture: Tensor, geometry: Geometry) -> Tensor:
        """Resize the source box of `picture` into the target box; float32 in 0..255."""
        source, target = geometry
        part = picture[
            :, source.top : source.top + source.height, source.left : source.left + source.width
        ]
        resized = resize(part, (target.height, target.width))
        if (target.height, target.width) == self.size:
            return resized
        canvas = 255 * torch.tensor(self.mean, device=picture.device).view(-1, 1, 1)
        canvas = canvas.repeat(1, *self.size)
        canvas[
            :, target.top : target.top + target.height, target.left : target.left + target.width
        ] = resized
        return canvas

    def shown(self, picture: Tensor) -> Tensor:
        """The picture as the model sees it, for display: uint8 (c, h, w), not normalised."""
        return self.fitted(picture).round().clamp(0, 255).to(torch.uint8)

    def normalise(self, images: Tensor) -> Tensor:
        """(…, c, h, w) in 0..255 to float32, (v / 255 - mean) / std."""
        mean = torch.tensor(self.mean, device=images.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=images.device).view(-1, 1, 1)
        return (images.to(torch.float32) - 255 * mean) / (255 * std)

    def denormalise(self, images: Tensor) -> Tensor:
        """Model input (…, c, h, w) back to uint8, for display."""
        mean = torch.tensor(self.mean, device=images.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=images.device).view(-1, 1, 1)
        values = 255 * (images.to(torch.float32) * std + mean)
        return values.round().clamp(0, 255).to(torch.uint8)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` takes it back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Preprocess":
        """Rebuild from `to_dict`'s result."""
        known = {"size", "fit", "channels", "mean", "std"}
        unknown = sorted(set(values) - known)
        if unknown or "size" not in values:
            what = f"does not know {unknown[0]!r}" if unknown else "lacks 'size'"
            raise InputError(f"the preprocessing on record {what}; its keys are {sorted(known)}")
        arguments: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**arguments)

    def _check(self, picture: Tensor) -> None:
        if picture.ndim != 3 or picture.dtype != torch.uint8:
            raise InputError(
                f"a picture of shape {tuple(picture.shape)} and {picture.dtype} came; "
                "uint8 (c, h, w) is needed"
            )
        if picture.shape[0] != self.channels:
            raise InputError(
                f"a picture of {picture.shape[0]} channels came; this preprocessing takes "
                f"{self.channels}: convert it with regard.data.to_channels"
            )


def round_ratio(a: Any, b: Any) -> Any:
    """a / b rounded to a whole number, halves to even; exact, and on symbolic sizes too."""
    quotient, rest = a // b, a % b
    return quotient + (2 * rest + quotient % 2 + b - 1) // (2 * b)


def resize(picture: Tensor, size: tuple[int, int]) -> Tensor:
    """(c, H, W) to float32 (c, h, w): antialiased bilinear, half-pixel centres."""
    values = picture.to(torch.float32)
    if tuple(values.shape[-2:]) == tuple(size):
        return values
    if size[1] == 1 < size[0]:  # torch 2.14 repeats the first row where one column comes out
        return resize(picture.transpose(1, 2), (1, size[0])).transpose(1, 2)
    return F.interpolate(
        values.unsqueeze(0), size=tuple(size), mode="bilinear", antialias=True, align_corners=False
    ).squeeze(0)


# Mean and standard deviation of a split's pixels, by channel.


def pixel_statistics(
    split: Split, sample: int = 4096
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) in 0..1 over at most `sample` pictures of the split (see `Split.sample`).

    Every pixel counts once, at the picture's own size; unreadable pictures do not count. For
    `Preprocess(mean=…, std=…)`; take the training split, as the held-out ones are not to be seen.
    """
    channels = split.source.channels
    count, total, squares = 0, np.zeros(channels), np.zeros(channels)
    for _, image in readable(split, split.sample(sample).tolist()):
        picture = image.numpy().reshape(channels, -1)
        # exact: float64 holds such sums of integers without rounding
        values = picture.astype(np.float64)
        count += values.shape[1]
        total += values.sum(1)
        squares += (values * values).sum(1)
    if count == 0:
        raise InputError("no picture of the split can be read, so it has no statistics")
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean * mean, 0))
    # A constant channel has no spread to divide by; 1/255, one grey level, stands in for it.
    return tuple((mean / 255).tolist()), tuple((np.maximum(std, 1) / 255).tolist())
