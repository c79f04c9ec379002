"""The one decoder: the bytes of a picture file to a uint8 tensor.

What it does with what cameras, scanners, phones and microscopes write:

- **Orientation** (EXIF or TIFF) is applied.
- **Palettes** are resolved; **CMYK**, YCbCr and Lab become RGB by Pillow's formulas, without the
  embedded colour profile.
- **Transparency** is laid over white.
- **16-bit grey** is scaled, v·255/65535 rounded; 16-bit colour keeps its high byte. A 32-bit
  integer picture is read as 16-bit if its values fit; a floating-point one must lie in [0, 1].
  Values with no stated range are refused rather than clipped.
- **Grey from colour** is ITU-R 601 luma, (19595 R + 38470 G + 7471 B + 2^15) >> 16.
- Of **several frames** or pages the first is read.
- **Huge** pictures, above twice Pillow's `Image.MAX_IMAGE_PIXELS` (178,956,970 pixels unless
  changed), are refused before their pixels are decoded.

JPEGs are decoded by simplejpeg where it is installed, else by Pillow: both are libjpeg-turbo with
the same settings and give the same bits; simplejpeg is faster. Colours other than YCbCr and grey,
and metadata that are not as the standard has them, are Pillow's part.
"""

import functools
import io
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.errors import InputError, MissingExtraError, RegardError
from regard.images.jpeg import decode_jpeg

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
