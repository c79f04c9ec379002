"""A colour scale that is perceptually uniform and safe for colour-blind readers."""

import base64
import functools
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

# Control points of a cubic Bézier curve in OKLab (lightness, red-green, blue-yellow): from a
# near-black violet through blue and teal to a light yellow. Lightness rises all the way, which
# every reader sees, and blue turns to yellow, which all but very few do.
CONTROL = np.array(
    [
        [0.15, 0.020, -0.080],
        [0.42, 0.060, -0.220],
        [0.66, -0.210, 0.030],
        [0.94, -0.052, 0.150],
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
    t = np.linspace(0, 1, 4096)[:, None]
    bernstein = np.concatenate(
        [(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3], axis=1
    )
    path = bernstein @ CONTROL
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


# PNG files without an imaging library.


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG file of pixels (h, w, 3), or (h, w) grey."""
    h, w = pixels.shape[:2]
    rows = np.ascontiguousarray(pixels).reshape(h, -1).astype(np.int16)
    step = rows.shape[1] // w
    # Filter 1: each byte less the one to its left, which photographs compress well by.
    left = np.concatenate([np.zeros((h, step), np.int16), rows[:, :-step]], axis=1)
    lines = np.concatenate([np.ones((h, 1), np.uint8), (rows - left).astype(np.uint8)], axis=1)
    header = struct.pack(">IIBBBBB", w, h, 8, 2 if step == 3 else 0, 0, 0, 0)

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    data = chunk(b"IDAT", zlib.compress(lines.tobytes(), 6))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


def data_uri(file: bytes, kind: str = "image/png") -> str:
    """A file as a link that holds it."""
    return f"data:{kind};base64,{base64.b64encode(file).decode('ascii')}"
