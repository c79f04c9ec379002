"""PNG pictures of what a model attends to, without a page."""

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard._io import atomic_write
from regard._png import paint, png
from regard.interpret.recording import GAP, sheet, tile_size
from regard.pages.look_data import LayerMaps, Look, Picture

# Pixels: of a line of words, beside words, and of the colour scale. Letters of a name, at most.
LINE = 20
EDGE = 6
SCALE = 160
LONGEST = 40

# How strongly the map covers the picture, and the width to which a small picture is enlarged.
OPACITY = 0.65
WIDTH = 448


def write_pictures(out: Path, name: str, found: Look, start: dict[str, Any]) -> list[Path]:
    """The two PNGs of one picture."""
    overlay, heads = out / f"{name}.png", out / f"{name}-heads.png"
    with atomic_write(overlay) as part:
        part.write_bytes(png(one_map(found, start)))
    with atomic_write(heads) as part:
        part.write_bytes(png(all_heads(found, start["at"])))
    return [overlay, heads]


def one_map(found: Look, start: dict[str, Any]) -> NDArray[np.uint8]:
    """The map that the page opens on over the picture, the place it looks from, and a caption."""
    values = chosen_map(found, start)
    pixels = beside(found.picture, values)
    if start["view"] == "relevance":
        words = f"relevance for the class {next(iter(found.relevance))!r}"
        return with_scale(pixels, words, "most")
    layer = found.layers[start["layer"]]
    mark_place(pixels, found.picture, cell_of(layer, start["at"]), layer.grid)
    heads = "mean over heads" if start["head"] is None else f"head {start['head'] + 1}"
    words = f"{start['layer'] + 1}: {layer.name}, {heads}, from {place_words(layer, start['at'])}"
    even = 100 * values.sum() / values.size
    return with_scale(pixels, words, f"{100 * values.max():.3g}% (evenly spread {even:.3g}%)")


def all_heads(found: Look, at: tuple[float, float]) -> NDArray[np.uint8]:
    """A row for each layer and a column for each head, named."""
    rows = [cell_map(maps, at) for maps in found.layers]
    names = [f"{i + 1}: {shortened(maps.name)}" for i, maps in enumerate(found.layers)]
    place = f"Where {place_words(found.layers[0], at)} looks; each map on a scale of its own"
    tall, wide = tile_size(rows)
    pixels = sheet(rows)
    margin = max(text_width(name) for name in names) + 2 * EDGE
    width = max(margin + pixels.shape[1], text_width(place)) + EDGE
    canvas = np.full((2 * LINE + pixels.shape[0] + EDGE, width, 3), 255, np.uint8)
    canvas[2 * LINE : 2 * LINE + len(pixels), margin : margin + pixels.shape[1]] = pixels
    columns = range(max(len(maps) for maps in rows))
    middle = 2 * LINE + (tall - LINE) // 2
    return write_words(canvas, [
        ((EDGE, 0), place),
        *(((margin + j * (wide + GAP), LINE), f"{'head ' * (j == 0)}{j + 1}") for j in columns),
        *(((EDGE, middle + i * (tall + GAP)), name) for i, name in enumerate(names)),
    ])  # fmt: skip


def cell_of(maps: LayerMaps, at: tuple[float, float]) -> tuple[int, int]:
    """(row, column) of the place `at`, shares of the input, on a layer's grid."""
    h, w = maps.grid
    return int(at[0] * h), int(at[1] * w)


def place_words(maps: LayerMaps, at: tuple[float, float]) -> str:
    """The place `at` in words, counted from 1 as the page does."""
    row, column = cell_of(maps, at)
    return f"row {row + 1}, column {column + 1} of {maps.grid[0]} by {maps.grid[1]}"


def mark_place(
    pixels: NDArray[np.uint8], one: Picture, cell: tuple[int, int], grid: tuple[int, int]
) -> None:
    """Frame a cell, white within black, on the right one of two pictures side by side."""
    height, width = one.original.shape[-2:]
    zoom = pixels.shape[0] // height
    top, left, bottom, right = (zoom * edge for edge in one.box())
    offset = pixels.shape[1] - zoom * width
    y = [top + (cell[0] + i) / grid[0] * (bottom - top) for i in (0, 1)]
    x = [offset + left + (cell[1] + i) / grid[1] * (right - left) for i in (0, 1)]
    y0, y1 = (min(max(round(v), 0), pixels.shape[0]) for v in y)
    x0, x1 = (min(max(round(v), offset), pixels.shape[1]) for v in x)
    inside = pixels[y0 + 4 : y1 - 4, x0 + 4 : x1 - 4].copy()
    pixels[y0:y1, x0:x1] = 0
    pixels[y0 + 2 : y1 - 2, x0 + 2 : x1 - 2] = 255
    pixels[y0 + 4 : y1 - 4, x0 + 4 : x1 - 4] = inside


def with_scale(pixels: NDArray[np.uint8], words: str, most: str) -> NDArray[np.uint8]:
    """The picture over a line of words and a line with the colour scale, from 0 to `most`."""
    start = 2 * EDGE + text_width("0")
    ends = text_width(words) + 2 * EDGE, start + SCALE + 2 * EDGE + text_width(most)
    width = max(pixels.shape[1], *ends)
    canvas = np.full((len(pixels) + 2 * LINE + EDGE, width, 3), 255, np.uint8)
    canvas[: len(pixels), : pixels.shape[1]] = pixels
    low = len(pixels) + LINE
    ramp = paint(np.linspace(0, 1, SCALE)[None])
    canvas[low + EDGE : low + LINE - 2, start : start + SCALE] = ramp
    return write_words(canvas, [
        ((EDGE, len(pixels)), words), ((EDGE, low), "0"), ((start + SCALE + EDGE, low), most),
    ])  # fmt: skip


def write_words(
    pixels: NDArray[np.uint8], words: list[tuple[tuple[int, int], str]]
) -> NDArray[np.uint8]:
    """The picture with words, each with its left edge and the top of its line at (x, y)."""
    from PIL import Image, ImageDraw

    image = Image.fromarray(pixels)
    pen = ImageDraw.Draw(image)
    for (x, y), text in words:
        pen.text((x, y + LINE / 2), text, fill="black", font=font(), anchor="lm")
    return np.asarray(image)


def text_width(text: str) -> int:
    """Pixels that a line of words takes."""
    return math.ceil(font().getlength(text))


@functools.cache
def font() -> Any:
    """The font that Pillow brings along."""
    from PIL import ImageFont

    return ImageFont.load_default(13)


def shortened(name: str) -> str:
    """A long module name by its end."""
    return name if len(name) <= LONGEST else f"...{name[3 - LONGEST :]}"


def chosen_map(found: Look, start: dict[str, Any]) -> NDArray[np.floating]:
    """The map (h, w) that the page opens on."""
    if start["view"] == "relevance":
        return next(iter(found.relevance.values())).numpy()
    heads = cell_map(found.layers[start["layer"]], start["at"])
    return heads.mean(0) if start["head"] is None else heads[start["head"]]


def cell_map(maps: LayerMaps, at: tuple[float, float]) -> NDArray[np.floating]:
    """Where the place `at` looks, of each head: (g, h, w)."""
    h, w = maps.grid
    row, column = cell_of(maps, at)
    token = row * w + column
    return maps.weights[:, token].reshape(-1, h, w).numpy()


def beside(one: Picture, values: NDArray[np.floating]) -> NDArray[np.uint8]:
    """The original (H, W, 3) beside itself under a map (h, w), small pictures enlarged."""
    original = one.original.expand(3, -1, -1).permute(1, 2, 0).numpy()
    zoom = max(1, round(WIDTH / original.shape[1]))
    original = original.repeat(zoom, 0).repeat(zoom, 1)
    height, width = original.shape[:2]
    top, left, bottom, right = (zoom * edge for edge in one.box())
    h, w = values.shape
    # The cell under the centre of each pixel; -1 outside what the model saw.
    rows = np.floor((np.arange(height) + 0.5 - top) / (bottom - top) * h).astype(int)
    columns = np.floor((np.arange(width) + 0.5 - left) / (right - left) * w).astype(int)
    seen = ((rows >= 0) & (rows < h))[:, None] & ((columns >= 0) & (columns < w))[None]
    colours = paint(values)[rows.clip(0, h - 1)][:, columns.clip(0, w - 1)]
    mixed = OPACITY * colours + (1 - OPACITY) * original
    covered = np.where(seen[..., None], mixed, 0.35 * original).round().astype(np.uint8)
    gap = np.full((height, 12, 3), 255, np.uint8)
    return np.concatenate([original, gap, covered], axis=1)
