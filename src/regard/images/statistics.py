"""Mean and standard deviation of a split's pixels, by channel."""

import numpy as np

from regard.errors import InputError
from regard.images.data import Split, readable


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
