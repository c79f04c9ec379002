"""JPEGs by simplejpeg, where it is installed: the bits that Pillow gives, in less time."""

import functools
import re
import types
from collections.abc import Callable

import numpy as np

_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_ORIENTATION = 0x0112
_SHORT = 3  # the type that Exif prescribes for it
_IN_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def decode_jpeg(
    raw: bytes, check_size: Callable[[int, int], None]
) -> tuple[np.ndarray, int] | None:
    """The stored pixels (h, w, 1) or (h, w, 3) of a JPEG and its orientation, 1 being upright.

    None where Pillow has to look: at other formats, at colours other than YCbCr and grey, at
    metadata that are not as the standard has them, and at damaged files, for the verdict and the
    reason. `check_size(width, height)` refuses huge pictures before their pixels are decoded.
    """
    simplejpeg = _simplejpeg()
    if simplejpeg is None or raw[:2] != b"\xff\xd8":
        return None
    orientation = stored_orientation(raw)
    if orientation is None:
        return None
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(raw, strict=True)
        if space not in ("YCbCr", "Gray"):
            return None
        check_size(width, height)
        kind = "Gray" if space == "Gray" else "RGB"
        return simplejpeg.decode_jpeg(raw, kind, strict=True), orientation
    except ValueError:
        return None


@functools.cache
def _simplejpeg() -> types.ModuleType | None:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def stored_orientation(raw: bytes) -> int | None:
    """The orientation in a JPEG's Exif, else in its XMP, else 1; None where it is in doubt."""
    exif, xmp = b"", b""
    at = 2
    while raw[at : at + 1] == b"\xff":
        marker = raw[at + 1] if at + 1 < len(raw) else 0
        if marker == 0xDA:  # start of scan: the metadata lie before it
            found = _in_tiff(exif) if exif else 0
            in_xmp = _IN_XMP.search(xmp)
            if found == 0:
                return int(in_xmp[1]) if in_xmp else 1
            return found
        length = int.from_bytes(raw[at + 2 : at + 4], "big")
        if marker == 0xE1:
            body = raw[at + 4 : at + 2 + length]
            if body.startswith(_EXIF):
                if exif:  # a second block goes on with the first
                    return None
                exif = body[len(_EXIF) :]
            elif body.startswith(_XMP):
                xmp = body
        at += 2 + length
    return None


def _in_tiff(tiff: bytes) -> int | None:
    """The orientation in the first directory of Exif's TIFF; 0 where it has none."""
    order = {b"II*\0": "little", b"MM\0*": "big"}.get(tiff[:4])
    if order is None:
        return None

    def number(at: int, size: int) -> int:
        return int.from_bytes(tiff[at : at + size], order)  # type: ignore[arg-type]

    start = number(4, 4)
    count = number(start, 2)
    end = start + 2 + 12 * count
    if start < 8 or end > len(tiff):
        return None
    found = 0
    for entry in range(start + 2, end, 12):
        if number(entry, 2) == _ORIENTATION:
            usual = number(entry + 2, 2) == _SHORT and number(entry + 4, 4) == 1
            if found or not usual or not 1 <= number(entry + 8, 2) <= 8:
                return None
            found = number(entry + 8, 2)
    return found
