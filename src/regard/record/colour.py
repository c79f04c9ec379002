"""A colour scale that is perceptually uniform and safe for colour-blind readers."""

import functools

import numpy as np
from numpy.typing import NDArray

# Lightness, and place on the red-green and blue-yellow axes, in OKLab: from a dark blue through
# a grey to a light yellow. Every dichromat sees lightness, and all but a few in ten thousand
# the blue-yellow axis.
ANCHORS = np.array(
    [
        [0.16, 0.005, -0.085],
        [0.36, -0.005, -0.110],
        [0.58, 0.005, -0.015],
        [0.78, 0.002, 0.105],
        [0.95, -0.035, 0.145],
    ]
)

# OKLab to linear sRGB: Ottosson 2020, "A perceptual color space for image processing".
TO_CONES = np.array(
    [
        [1.0, 0.3963377774, 0.2158037573],
        [1.0, -0.1055613458, -0.0638541728],
        [1.0, -0.0894841775, -1.2914855480],
    ]
)
TO_RGB = np.array(
    [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
)


@functools.cache
def scale() -> NDArray[np.uint8]:
    """256 sRGB colours (256, 3), dark to light, at equal steps of OKLab distance."""
    along = np.linspace(0, 1, 4096)
    knots = np.linspace(0, 1, len(ANCHORS))
    path = np.stack([np.interp(along, knots, axis) for axis in ANCHORS.T], axis=1)
    steps = np.linalg.norm(np.diff(path, axis=0), axis=1)
    length = np.concatenate([[0], np.cumsum(steps)])
    wanted = np.linspace(0, length[-1], 256)
    lab = np.stack([np.interp(wanted, length, axis) for axis in path.T], axis=1)
    return np.round(255 * to_srgb(lab)).astype(np.uint8)


def to_srgb(lab: NDArray[np.float64]) -> NDArray[np.float64]:
    """OKLab (…, 3) to sRGB (…, 3) in 0..1, clipped to the gamut."""
    linear = ((lab @ TO_CONES.T) ** 3 @ TO_RGB.T).clip(0, 1)
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def paint(values: NDArray[np.floating], top: float | None = None) -> NDArray[np.uint8]:
    """Values (…), 0 dark and `top` (their maximum unless given) light, to sRGB (…, 3)."""
    top = float(values.max()) if top is None else top
    share = values / top if top > 0 else np.zeros_like(values)
    return scale()[np.round(255 * share.clip(0, 1)).astype(np.uint8)]
