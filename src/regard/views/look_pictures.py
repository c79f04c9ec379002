"""PNG pictures of what a model attends to, without a page."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.files import atomic_write
from regard.record.colour import paint
from regard.record.picture import png, sheet
from regard.views.look_data import LayerMaps, Look, Picture

# How strongly the map covers the picture, and the width to which a small picture is enlarged.
OPACITY = 0.65
WIDTH = 448


def write_pictures(out: Path, name: str, found: Look, start: dict[str, Any]) -> list[Path]:
    """The two PNGs of one picture."""
    shown = chosen_map(found, start)
    overlay, heads = out / f"{name}.png", out / f"{name}-heads.png"
    with atomic_write(overlay) as part:
        part.write_bytes(png(beside(found.picture, shown)))
    with atomic_write(heads) as part:
        part.write_bytes(png(sheet([cell_map(maps, start["at"]) for maps in found.layers])))
    return [overlay, heads]


def chosen_map(found: Look, start: dict[str, Any]) -> NDArray[np.floating]:
    """The map (h, w) that the page opens on."""
    if start["view"] == "relevance":
        return next(iter(found.relevance.values())).numpy()
    heads = cell_map(found.layers[start["layer"]], start["at"])
    return heads.mean(0) if start["head"] is None else heads[start["head"]]


def cell_map(maps: LayerMaps, at: tuple[float, float]) -> NDArray[np.floating]:
    """Where the place `at` looks, of each head: (g, h, w)."""
    h, w = maps.grid
    token = int(at[0] * h) * w + int(at[1] * w)
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
