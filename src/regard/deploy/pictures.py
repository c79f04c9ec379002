"""Whatever holds pictures, as uint8 tensors."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import InputError
from regard.images import UnreadableImage, decode, to_channels
from regard.images.decode import from_pillow
from regard.images.folder import read_file

FORMS = (
    "a path, the bytes of a picture file, a PIL image, a uint8 array (h, w), (h, w, c) or "
    "(n, h, w, c), a uint8 tensor (h, w), (c, h, w) or (n, c, h, w), or an iterable of these"
)


def each_picture(images: Any, channels: int) -> Iterator[Tensor]:
    """Pictures one by one, uint8 (c, h, w) with c = `channels`; one alone counts as one.

    Arrays have their channels last, tensors first, 1 or 3 of them. A file is opened by the one
    decoder. Raises `UnreadableImage` for a file that cannot be decoded, `InputError` for what
    holds no pictures.
    """
    if isinstance(images, (str, Path)):
        yield read_picture(Path(images), channels)
    elif isinstance(images, (bytes, bytearray, memoryview)):
        yield decode(bytes(images), channels)
    elif isinstance(images, Tensor):
        for picture in stacked(images, "a tensor"):
            yield to_channels(picture, channels)
    elif isinstance(images, np.ndarray):
        # h w c -> c h w
        batch = torch.from_numpy(np.ascontiguousarray(images)) if images.size else torch.empty(0)
        for picture in stacked(batch, "an array"):
            yield to_channels(picture, channels)
    elif hasattr(images, "getexif"):
        yield from_pillow(images, channels)
    elif isinstance(images, Iterable):
        for image in images:
            yield from each_picture(image, channels)
    else:
        raise InputError(
            f"no pictures are in an object of type {type(images).__name__}; give {FORMS}"
        )


def read_picture(path: Path, channels: int) -> Tensor:
    """A picture file."""
    try:
        raw = read_file(path)
    except OSError as error:
        raise UnreadableImage(str(path), error.strerror or str(error)) from None
    return decode(raw, channels, str(path))


def stacked(values: Tensor, what: str) -> Tensor:
    """A tensor (channels first) or array (channels last) of pictures, as (n, c, h, w)."""
    came = f"{what} of shape {tuple(values.shape)} and {str(values.dtype).removeprefix('torch.')}"
    if values.dtype != torch.uint8:
        raise InputError(
            f"{came} came; pictures are uint8, 0..255: preprocessing is this predictor's part"
        )
    if values.ndim == 2:
        values = values[None] if what == "a tensor" else values[:, :, None]
    if values.ndim == 3:
        values = values[None]
    axis = 1 if what == "a tensor" else 3
    if values.ndim != 4 or values.shape[axis] not in (1, 3) or 0 in values.shape[1:]:
        raise InputError(f"{came} came; give {FORMS}, with 1 or 3 channels")
    return values if what == "a tensor" else values.permute(0, 3, 1, 2)  # n h w c -> n c h w
