"""Plain JPEGs by simplejpeg, where it is installed: the bits that Pillow gives, in less time."""

import functools
import types
from collections.abc import Callable

import numpy as np


def decode_plain_jpeg(raw: bytes, check_size: Callable[[int, int], None]) -> np.ndarray | None:
    """The pixels (h, w, 1) or (h, w, 3) of a plain JPEG, or None where Pillow has to look.

    `check_size(width, height)` refuses huge pictures before their pixels are decoded. What is
    damaged gives None too: Pillow gives the verdict, and the reason.
    """
    simplejpeg = _simplejpeg()
    if simplejpeg is None or not _is_plain(raw):
        return None
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(raw, strict=True)
        if space not in ("YCbCr", "Gray"):
            return None
        check_size(width, height)
        return simplejpeg.decode_jpeg(raw, "Gray" if space == "Gray" else "RGB", strict=True)
    except ValueError:
        return None


@functools.cache
def _simplejpeg() -> types.ModuleType | None:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def _is_plain(raw: bytes) -> bool:
    """Whether this is a JPEG with nothing that turns it or redefines its components.

    APP1 holds Exif and XMP, which may do the former; APP14 is Adobe's, which may do the latter.
    """
    if raw[:2] != b"\xff\xd8":
        return False
    at = 2
    while raw[at : at + 1] == b"\xff":
        marker = raw[at + 1] if at + 1 < len(raw) else 0
        if marker in (0xE1, 0xEE):
            return False
        if marker == 0xDA:  # start of scan
            return True
        at += 2 + int.from_bytes(raw[at + 2 : at + 4], "big")
    return False
