"""JPEGs by simplejpeg, where it is installed: the bits that Pillow gives, in less time."""

import functools
import io
import re
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.errors import InputError, MissingExtraError, RegardError

_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_ORIENTATION_TAG = 0x0112
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
        if number(entry, 2) == _ORIENTATION_TAG:
            usual = number(entry + 2, 2) == _SHORT and number(entry + 4, 4) == 1
            if found or not usual or not 1 <= number(entry + 8, 2) <= 8:
                return None
            found = number(entry + 8, 2)
    return found


# The one decoder: the bytes of a picture file to a uint8 tensor.
#
# What it does with what cameras, scanners, phones and microscopes write:
#
# - **Orientation** (EXIF or TIFF) is applied.
# - **Palettes** are resolved; **CMYK**, YCbCr and Lab become RGB by Pillow's formulas, without the
#   embedded colour profile.
# - **Transparency** is laid over white.
# - **16-bit grey** is scaled, v·255/65535 rounded; 16-bit colour keeps its high byte. A 32-bit
#   integer picture is read as 16-bit if its values fit; a floating-point one must lie in [0, 1].
#   Values with no stated range are refused rather than clipped.
# - **Grey from colour** is ITU-R 601 luma, (19595 R + 38470 G + 7471 B + 2^15) >> 16.
# - Of **several frames** or pages the first is read.
# - **Huge** pictures, above twice Pillow's `Image.MAX_IMAGE_PIXELS` (178,956,970 pixels unless
#   changed), are refused before their pixels are decoded.
#
# JPEGs are decoded by simplejpeg where it is installed, else by Pillow: both are libjpeg-turbo with
# the same settings and give the same bits; simplejpeg is faster. Colours other than YCbCr and grey,
# and metadata that are not as the standard has them, are Pillow's part.


_ORIENTATION = 0x0112


class UnreadableImage(RegardError):
    """A picture that cannot be decoded; `name` is the file, `reason` why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} cannot be read: {reason}")
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.name, self.reason)


class Header(NamedTuple):
    """What a file says about itself: stored width and height, before orientation is applied."""

    format: str
    mode: str
    width: int
    height: int
    frames: int
    orientation: int


def decode(raw: bytes, channels: int, name: str = "picture") -> Tensor:
    """Decode a picture file to uint8 (c, h, w) with c = `channels`, 1 or 3.

    The tensor is a view of (h, w, c) or (w, h, c) memory. Raises `UnreadableImage` with the
    reason.
    """
    check_channels(channels)
    try:
        picture = _upright(*(decode_jpeg(raw, _check_size) or _decode_pillow(raw)))
    except MissingExtraError:
        raise
    except UnreadableImage as error:
        raise UnreadableImage(name, error.reason) from None
    except Exception as error:  # decoders raise almost anything on hostile bytes
        raise UnreadableImage(name, _reason(raw, error)) from None
    return to_channels(picture, channels)


def from_pillow(image: Any, channels: int, name: str = "picture") -> Tensor:
    """A PIL image to uint8 (c, h, w), as `decode` reads its file."""
    check_channels(channels)
    try:
        _check_size(*image.size)
        picture = _upright(*_pixels(image))
    except UnreadableImage as error:
        raise UnreadableImage(name, error.reason) from None
    except Exception as error:
        raise UnreadableImage(name, str(error) or type(error).__name__) from None
    return to_channels(picture, channels)


def to_channels(picture: Tensor, channels: int) -> Tensor:
    """Grey to colour by repetition, colour to grey by ITU-R 601 luma; uint8 (c, h, w)."""
    check_channels(channels)
    if picture.shape[0] == channels:
        return picture
    if picture.shape[0] == 1:
        # h w 1 memory -> h w 3 memory
        return picture.permute(1, 2, 0).expand(-1, -1, 3).contiguous().permute(2, 0, 1)
    if picture.shape[0] != 3:
        raise InputError(f"a picture has {picture.shape[0]} channels; 1 or 3 are needed")
    red, green, blue = picture.to(torch.int32)
    luma = (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16
    return luma.to(torch.uint8).unsqueeze(0)


def check_channels(channels: int) -> None:
    """Refuse anything but 1 (grey) and 3 (colour)."""
    if channels not in (1, 3):
        raise InputError(f"channels is {channels!r}; give 1 (grey) or 3 (colour)")


def read_header(raw: bytes) -> Header:
    """What a file says about itself, without decoding its pixels; raises as `decode` does."""
    try:
        with _open(raw) as image:
            orientation = int(image.getexif().get(_ORIENTATION, 1))
            frames = int(getattr(image, "n_frames", 1))
            return Header(
                image.format or "?", image.mode, image.width, image.height, frames, orientation
            )
    except (MissingExtraError, UnreadableImage):
        raise
    except Exception as error:
        raise UnreadableImage("picture", _reason(raw, error)) from None


@functools.cache
def _pillow() -> Any:
    """Pillow, or the refusal that names the extra."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("pillow", "train", "reading pictures") from None
    return Image


def pixel_limit() -> int | None:
    """Pictures with more pixels are refused; Pillow's own hard limit."""
    limit = _pillow().MAX_IMAGE_PIXELS
    return None if limit is None else 2 * int(limit)


def _check_size(width: int, height: int) -> None:
    limit = pixel_limit()
    if limit is not None and width * height > limit:
        raise UnreadableImage(
            "picture",
            f"{width} x {height} pixels are over the limit of {limit:,}; cut it into tiles or "
            "scale it down",
        )


def _open(raw: bytes) -> Any:
    pillow = _pillow()
    with warnings.catch_warnings():
        # Pillow warns at half of our stated limit and about odd metadata; neither is an error.
        warnings.simplefilter("ignore")
        image = pillow.open(io.BytesIO(raw))
    _check_size(*image.size)
    return image


def _decode_pillow(raw: bytes) -> tuple[np.ndarray, int]:
    """Any format Pillow knows, as uint8 (h, w, 1) or (h, w, 3), and its orientation."""
    with _open(raw) as image:
        return _pixels(image)


def _pixels(image: Any) -> tuple[np.ndarray, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image.load()
        # After loading: PNG stores it behind the pixels, and TIFF is turned by Pillow itself.
        orientation = int(image.getexif().get(_ORIENTATION, 1))
        return np.require(_eight_bit(image), requirements=("C", "W")), orientation


def _eight_bit(image: Any) -> np.ndarray:
    mode = image.mode
    if mode.startswith("I;16") or mode in ("I", "F"):
        return _scaled(np.asarray(image))[:, :, None]
    if "transparency" in image.info or mode in ("LA", "La", "PA", "RGBA", "RGBa"):
        grey = mode in ("1", "L", "LA", "La")
        image = image.convert("RGBA")
        white = _pillow().new("RGBA", image.size, (255, 255, 255, 255))
        pixels = np.asarray(_pillow().alpha_composite(white, image).convert("RGB"))
        return pixels[:, :, :1] if grey else pixels
    if mode in ("1", "L"):
        return np.array(image.convert("L"))[:, :, None]
    return np.array(image.convert("RGB"))


def _scaled(values: np.ndarray) -> np.ndarray:
    """Deep grey values (h, w) to uint8, or a refusal where their range is unknown."""
    if values.dtype.kind == "f":
        low, high = float(values.min()), float(values.max())
        if not (low >= 0 and high <= 1):  # also refuses NaN
            raise UnreadableImage(
                "picture",
                f"floating-point values from {low:.4g} to {high:.4g} have no stated range; "
                "rescale them to 0..1",
            )
        return np.round(values * 255).astype(np.uint8)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise UnreadableImage(
            "picture",
            f"integer values from {low} to {high} have no stated range; rescale them to 0..65535",
        )
    # 65535 = 255 · 257, so this is round(v · 255 / 65535)
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _upright(pixels: np.ndarray, orientation: int) -> Tensor:
    """Stored pixels (h, w, c) as (c, h, w), the Exif orientation undone; outside 2..8 is upright.

    Turning exchanges the strides and flips the stored rows or columns, which costs torch a
    fraction of what moving every pixel does.
    """
    stored = torch.from_numpy(pixels)  # h w c
    flips = {2: (1,), 3: (0, 1), 4: (0,), 6: (0,), 7: (0, 1), 8: (1,)}.get(orientation, ())
    if flips:
        stored = stored.flip(flips)
    if 5 <= orientation <= 8:
        stored = stored.transpose(0, 1)
    return stored.permute(2, 0, 1)


def _reason(raw: bytes, error: Exception) -> str:
    """A decoder's complaint in words that help."""
    if not raw:
        return "the file is empty"
    if raw[4:12] in (b"ftypheic", b"ftypheix", b"ftypmif1", b"ftyphevc"):
        return "it is HEIC, which Pillow does not open; convert it to JPEG or PNG"
    name = type(error).__name__
    if name == "UnidentifiedImageError":
        return f"no known picture format (it begins with {raw[:8]!r})"
    if name == "DecompressionBombError":
        return f"over the limit of {pixel_limit():,} pixels; cut it into tiles or scale it down"
    return f"{str(error) or name}"
