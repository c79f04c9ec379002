"""The images of a study, decoded once and shared by all its runs through one file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from regard.errors import InputError, counted
from regard.files import atomic_write
from regard.images import Data, Preprocess, Split, readable
from regard.images.keys import SPLIT, key


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images as the model's input shows them, uint8 (n, c, h, w), and labels (n,) int64."""

    images: Tensor
    labels: Tensor
    val_images: Tensor
    val_labels: Tensor

    def to(self, device: torch.device) -> "Pictures":
        return Pictures(*(tensor.to(device) for tensor in vars(self).values()))

    @property
    def chance(self) -> float:
        """Share of the most frequent class among the held-out images."""
        return float(torch.bincount(self.val_labels).max() / len(self.val_labels))

    def save(self, path: Path) -> None:
        """One archive of plain arrays."""
        arrays = {name: tensor.numpy() for name, tensor in vars(self).items()}
        with atomic_write(path) as part, part.open("wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> "Pictures":
        with np.load(path, allow_pickle=False) as file:
            return cls(**{name: torch.from_numpy(file[name]) for name in file.files})


def read_pictures(
    data: Data, preprocess: Preprocess, most: int, say: Callable[[str], None]
) -> Pictures:
    """At most `most` training and as many held-out images of `data`.

    Which ones depends on nothing but their number, so that every study takes the same. Images
    that cannot be read are left out, and how many is said.
    """
    parts: list[Tensor] = []
    for title in ("train", "val"):
        images, labels, lost = read_split(data.splits[title], preprocess, most)
        if lost:
            say(f"{data.name}: {counted(lost, f'{title} image')} could not be read and left out")
        if not len(images):
            raise InputError(f"no {title} image of {data.name} could be read; study other data")
        parts += [images, labels]
    return Pictures(*parts)


def read_split(split: Split, preprocess: Preprocess, most: int) -> tuple[Tensor, Tensor, int]:
    """Images, labels and the number of images that could not be read."""
    order = np.argsort(key(SPLIT, np.arange(len(split))), kind="stable")[:most]
    images, labels = [], []
    for i, picture in readable(split, np.sort(order).tolist()):
        images.append(preprocess.shown(picture))
        labels.append(int(split.labels[i]))
    shape = (0, preprocess.channels, *preprocess.size)
    stacked = torch.stack(images) if images else torch.empty(shape, dtype=torch.uint8)
    return stacked, torch.tensor(labels, dtype=torch.int64), len(order) - len(images)
