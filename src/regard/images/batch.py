"""A batch, and how pictures become one."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.images.data import Split
from regard.images.decode import UnreadableImage
from regard.images.preprocess import Preprocess


@dataclass(frozen=True)
class Batch:
    """Images (b, c, h, w) float32, normalised, and what they are.

    `targets` (b, k) float32 class probabilities, one-hot or mixed; `labels` (b,) int64; `weights`
    (b,) float32, 0 where the file could not be read (the image is zeros then) and 1 elsewhere: a
    mean over the batch divides by their sum, which may be 0. `indices` (b,) int64 positions in
    the split. `unreadable` holds (index, name, reason) of each picture of weight 0.
    """

    images: Tensor
    targets: Tensor
    labels: Tensor
    weights: Tensor
    indices: Tensor
    unreadable: tuple[tuple[int, str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same batch on a device; `indices` stay where they are."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=non_blocking)
            for name in ("images", "targets", "labels", "weights")
        }
        return replace(self, **moved)

    def split(self, size: int) -> list["Batch"]:
        """Microbatches of `size`, as views; the last may be smaller."""
        parts = []
        for start in range(0, len(self), size):
            cut = slice(start, start + size)
            held = set(self.indices[cut].tolist())
            bad = tuple(entry for entry in self.unreadable if entry[0] in held)
            parts.append(
                Batch(
                    self.images[cut],
                    self.targets[cut],
                    self.labels[cut],
                    self.weights[cut],
                    self.indices[cut],
                    bad,
                )
            )
        return parts


def join(parts: list[Batch]) -> Batch:
    """One batch of several, in order."""
    if len(parts) == 1:
        return parts[0]
    return Batch(
        torch.cat([part.images for part in parts]),
        torch.cat([part.targets for part in parts]),
        torch.cat([part.labels for part in parts]),
        torch.cat([part.weights for part in parts]),
        torch.cat([part.indices for part in parts]),
        tuple(entry for part in parts for entry in part.unreadable),
    )


def collate(
    split: Split,
    preprocess: Preprocess,
    indices: np.ndarray,
    prepare: Callable[[Tensor, int], Tensor] | None = None,
) -> Batch:
    """Read, prepare and normalise the pictures at `indices`.

    `prepare(picture, j)` brings the j-th of them to the input's size, in 0..255; unless given,
    they are fitted as evaluation does, which at that size already changes nothing.
    """
    if prepare is None:
        whole = split.together(indices)
        if whole is not None and whole.shape[1:] == (preprocess.channels, *preprocess.size):
            return _labelled(split, indices, preprocess.normalise(whole))
    pictures, weights, unreadable = [], [], []
    for j, index in enumerate(indices.tolist()):
        try:
            picture = split.read(index)
        except UnreadableImage as error:
            unreadable.append((index, error.name, error.reason))
            pictures.append(torch.zeros(preprocess.channels, *preprocess.size))
            weights.append(0.0)
        else:
            fitted = preprocess.fitted(picture) if prepare is None else prepare(picture, j)
            pictures.append(fitted)
            weights.append(1.0)
    kept = torch.tensor(weights)
    images = preprocess.normalise(torch.stack(pictures))
    if unreadable:
        images = images * kept.view(-1, 1, 1, 1)
    batch = _labelled(split, indices, images)
    return replace(batch, weights=kept, unreadable=tuple(unreadable))


def _labelled(split: Split, indices: np.ndarray, images: Tensor) -> Batch:
    labels = torch.from_numpy(split.labels[indices])
    targets = F.one_hot(labels, split.num_classes).to(torch.float32)
    return Batch(images, targets, labels, torch.ones(len(labels)), torch.from_numpy(indices))
