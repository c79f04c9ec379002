"""Pictures of a recording: PNG files without an imaging library, and what a notebook shows."""

import base64
import html
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from regard.errors import counted
from regard.record.colour import paint

if TYPE_CHECKING:
    from regard.record.recording import Attention, Recording

# Pixels between tiles, and the side to which a tile is enlarged, at least.
GAP = 2
TILE = 56


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


def tile_size(rows: list[NDArray[np.floating]]) -> tuple[int, int]:
    """Height and width of every tile of a `sheet`."""
    h, w = (max(maps.shape[axis] for maps in rows) for axis in (1, 2))
    zoom = max(1, -(-TILE // max(h, w)))
    return zoom * h, zoom * w


def sheet(rows: list[NDArray[np.floating]]) -> NDArray[np.uint8]:
    """A row of tiles for each layer, from maps (g, h, w); each map on a scale from 0 of its own.

    Coarser maps are enlarged to the tiles of the finest.
    """
    tall, wide = tile_size(rows)
    widest = max(len(maps) for maps in rows)
    canvas = np.full(
        (len(rows) * (tall + GAP) - GAP, widest * (wide + GAP) - GAP, 3), 255, np.uint8
    )
    for i, maps in enumerate(rows):
        h, w = maps.shape[1:]
        down, across = np.arange(tall) * h // tall, np.arange(wide) * w // wide
        for j, values in enumerate(maps):
            top, left = i * (tall + GAP), j * (wide + GAP)
            canvas[top : top + tall, left : left + wide] = paint(values)[down][:, across]
    return canvas


def shown_maps(attention: "Attention") -> tuple[str, Tensor] | None:
    """What to show of one attention, in words and as maps (g, h, w) of the first image."""
    if attention.keys.grid is None or attention.queries.grid != attention.keys.grid:
        return None
    if attention.weights is not None:
        weights = attention.weights[0]
        if attention.rows is not None:
            return "from the first chosen query", attention.map_of(weights[:, 0])
        return "received, mean over queries", attention.map_of(weights.mean(1))
    if attention.received is not None:
        return "received, mean over queries", attention.map_of(attention.received[0])
    if attention.mean is not None:
        mean = attention.mean[0, :1] if attention.rows is not None else attention.mean.mean(1)[:1]
        return "mean over heads", attention.map_of(mean)
    if attention.entropy is not None:
        return "entropy of each query", attention.map_of(attention.entropy[0])
    return None


def recording_png(seen: "Recording") -> bytes | None:
    """A sheet of maps, a row for each layer and a column for each head; None without a map."""
    shown = [found for found in map(shown_maps, seen.layers()) if found is not None]
    if not shown:
        return None
    return png(sheet([maps.float().cpu().numpy() for _, maps in shown]))


def recording_html(seen: "Recording") -> str:
    """The sheet with its legend, or the recording in words."""
    picture = recording_png(seen)
    words = html.escape(repr(seen))
    if picture is None:
        return f"<pre>{words}</pre>"
    what = next(found[0] for found in map(shown_maps, seen.layers()) if found is not None)
    return (
        f'<figure style="margin:0"><img alt="attention maps" src="{data_uri(picture)}" '
        f'style="image-rendering:pixelated"><figcaption>First image, {what}; a row for each '
        f"layer, a column for each head, each map scaled to its own maximum.</figcaption>"
        f"<details><summary>{counted(len(seen), 'attention')}</summary><pre>{words}</pre>"
        "</details></figure>"
    )
