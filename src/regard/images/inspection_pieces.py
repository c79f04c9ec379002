"""Pieces of the inspection page: sections, and pictures as data addresses."""

import base64
import io
import math
from html import escape

from torch import Tensor

from regard.images.decode import UnreadableImage
from regard.images.inspection import Inspection, Place
from regard.images.preprocess import Preprocess

_SIDE = 160  # pixels of a shown picture, at most


def section(title: str, lead: str, body: str) -> str:
    return f"<section><h2>{title}</h2><p class=sub>{lead}</p>{body}</section>"


def figure(picture: Tensor, caption: str, name: str) -> str:
    return (
        f'<figure>{_image(picture, name)}<figcaption title="{escape(name)}">{escape(caption)}'
        "</figcaption></figure>"
    )


def _image(picture: Tensor, name: str) -> str:
    small = max(picture.shape[-2:]) <= 64
    return (
        f'<img src="{_encode(picture)}" alt="{escape(name)}"{" class=pixels" if small else ""} '
        f"width={picture.shape[2]} height={picture.shape[1]}>"
    )


def _encode(picture: Tensor) -> str:
    """uint8 (c, h, w) as a data address: PNG while small, else JPEG."""
    from PIL import Image

    pixels = picture.permute(1, 2, 0).contiguous().numpy()
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    kind = "png" if max(image.size) <= 64 else "jpeg"
    image.thumbnail((2 * _SIDE, 2 * _SIDE))
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"quality": 85} if kind == "jpeg" else {"optimize": True}))
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def read_again(inspection: Inspection, place: Place) -> Tensor | None:
    try:
        return inspection.data.splits[place.split].read(place.i)
    except UnreadableImage:
        return None  # it has gone bad since the scan; the next scan says so


def thumbnail(inspection: Inspection, place: Place) -> str:
    """The picture itself, small, with its split, class and name."""
    picture = read_again(inspection, place)
    if picture is None:
        image = ""
    else:
        scale = min(1.0, _SIDE / max(picture.shape[-2:]))
        size = tuple(max(1, math.floor(side * scale)) for side in picture.shape[-2:])
        whole = Preprocess((size[0], size[1]), channels=picture.shape[0])
        image = _image(whole.shown(picture), inspection.name(place))
    return (
        f"<figure>{image}<figcaption><b>{place.split}</b> {escape(inspection.label(place))}<br>"
        f"<code>{escape(inspection.name(place))}</code></figcaption></figure>"
    )
