"""Refusals of arguments that the layers share."""

import operator
from typing import Any

from torch import Tensor

from regard.errors import InputError


def count(value: Any, name: str) -> int:
    """`value` as a positive integer; True and 2.0 are none."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 1:
        raise InputError(f"{name}={value!r}: give a positive integer")
    return number


def flag(value: Any, name: str) -> bool:
    """`value`, which is True or False; "false" and 0 are neither."""
    if not isinstance(value, bool):
        raise InputError(f"{name}={value!r}: give true or false")
    return value


def share(value: Any, name: str) -> float:
    """`value` as a number of at least 0 and below 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise InputError(f"{name}={value!r}: give a number of at least 0 and below 1, such as 0.1")
    return float(value)


def divisor(value: Any, name: str, total: int, what: str) -> int:
    """`value` as a positive integer that divides `total`, the number of `what`."""
    number = count(value, name)
    if total % number:
        choices = [str(i) for i in range(1, total + 1) if total % i == 0]
        raise InputError(
            f"{name}={number} does not divide the {total} {what}: give one of {', '.join(choices)}"
        )
    return number


def pair(value: Any, name: str) -> tuple[int, int]:
    """`value` as (height, width) of positive integers; one integer stands for both."""
    sides = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(sides) != 2:
        raise InputError(f"{name}={value!r}: give a positive integer, or two as (height, width)")
    return count(sides[0], name), count(sides[1], name)


def check_images(images: Tensor, channels: int) -> None:
    """Refuse what is no batch of images with this many channels."""
    if not isinstance(images, Tensor):
        raise InputError(
            f"images are a {type(images).__name__}; give a tensor (batch, channels, height, width)"
        )
    if images.ndim != 4:
        raise InputError(
            f"images have shape {tuple(images.shape)}; give (batch, channels, height, width)"
        )
    if not images.is_floating_point():
        raise InputError(
            f"images have dtype {images.dtype}; give floating-point pixels, normalised as in "
            "training"
        )
    if images.shape[1] != channels:
        raise InputError(f"images have {images.shape[1]} channels; this model takes {channels}")


def check_finite(images: Tensor) -> None:
    """Refuse images to take statistics from that hold no, or not only, finite numbers."""
    if images.numel() == 0 or not images.isfinite().all():
        raise InputError(
            f"images of shape {tuple(images.shape)} to take statistics from are empty or hold NaN "
            "or infinity; give finite pixels"
        )
