"""scikit-learn's embedded digits: 1,797 grey pictures of 8 x 8 pixels, no download."""

import numpy as np
import torch
from torch import Tensor

from regard.errors import MissingExtraError
from regard.images.data import Source
from regard.images.decode import to_channels
from regard.images.splits import Listing


class DigitsSource(Source):
    """Pixel values 0..16 become round(v · 255 / 16), halves to even, as uint8."""

    has_files = False

    def __init__(self, values: np.ndarray, channels: int) -> None:
        super().__init__(channels)
        self.pictures = torch.from_numpy(np.round(values * (255 / 16)).astype(np.uint8))

    def name(self, item: int) -> str:
        return f"digits/{item:04d}"

    def raw(self, item: int) -> bytes:
        return self.pictures[item].numpy().tobytes()

    def stamp(self, item: int) -> str:
        return ""

    def read(self, item: int) -> Tensor:
        return to_channels(self.pictures[item].unsqueeze(0), self.channels)


def list_digits(channels: int | None) -> Listing:
    """The digits, one channel unless asked otherwise, classes "0" to "9"."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtraError("scikit-learn", "train", "the embedded digits") from None
    bunch = load_digits()
    count = len(bunch.target)
    return Listing(
        name="digits",
        source=DigitsSource(bunch.images, channels or 1),
        labels=[str(label) for label in bunch.target],
        splits=[""] * count,
        sizes=[64] * count,
    )
