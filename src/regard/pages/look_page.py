"""One self-contained page on which a picture is pointed at and every head shows where it looks."""

import base64
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from regard import _png as colour
from regard.data.preprocess import resize
from regard.pages.html import Html, joined, page, picture, section, tag
from regard.pages.look_data import LayerMaps, Look

# Bytes of weights in a page, one byte a weight; in base64 they grow by a third.
BUDGET = 3_400_000
# The longest side of a picture in a page, in pixels.
SIDE = 768

VIEWS = ("from", "received", "rollout", "relevance")


def look_page(
    look: Look,
    *,
    view: str = "from",
    layer: int = -1,
    head: int | None = None,
    at: tuple[float, float] = (0.5, 0.5),
    budget: int = BUDGET,
) -> str:
    """The page as one HTML document that refers to nothing outside itself.

    It opens on `view` ("from", "received", "rollout" or "relevance") of `layer` and `head` (None
    for the mean over heads), from the place `at`: (y, x) as shares of the model's input. Weights
    are stored in a byte each, as squares of 255 steps up to their row's maximum; grids that
    would take more than `budget` bytes are joined into coarser ones, and the page says so.
    """
    factor = joined_cells([*look.layers, *look.rollout], budget)
    layers = [coarser(maps, factor) for maps in look.layers]
    box, height, width = look.picture.box(), *look.picture.original.shape[-2:]
    data = {
        "picture": [height, width],
        "box": box,
        "view": view,
        "layer": range(len(layers))[layer],
        "head": -1 if head is None else head,
        "at": at,
        "colours": text_of(colour.scale().tobytes()),
        "layers": [stored(maps) for maps in layers],
        "rollout": [stored(coarser(maps, factor)) for maps in look.rollout],
        "relevance": [
            {"name": name, "grid": list(values.shape), "values": float_text(values)}
            for name, values in look.relevance.items()
        ],
    }
    return page(
        f"What the model attends to in {look.picture.name}",
        Html(f"<style>{template('look.css')}</style>"),
        tag("h1", "What the model attends to in ", look.picture.name),
        chances(look),
        controls(),
        stages(look),
        *notes(look, factor),
        tag(
            "div",
            section("Every layer and head"),
            tag(
                "p",
                "A row for each layer and a column for each head, each on a scale of its own from "
                "0 to its greatest. Click one to see it large.",
                class_="soft",
            ),
            Html('<canvas id="sheet" role="img" aria-label="All layers and heads"></canvas>'),
            id="many",
        ),
        Html(f'<script type="application/json" id="data">{json_text(data)}</script>'),
        Html(f"<script>{template('look.js')}</script>"),
    )


def stages(look: Look) -> Html:
    """The original beside the overlay; each can be pointed at."""
    image = picture(fitted(look.picture.original, SIDE), look.picture.name)
    height, width = look.picture.original.shape[-2:]
    stage: dict[str, Any] = {
        "class_": "stage",
        # As wide as there is room for, but never taller than three quarters of the screen.
        "style": f"width: min(100%, {75 * width / height:.4g}vh)",
        "tabindex": 0,
        "role": "application",  # arrow keys are for the page, not for a screen reader
        "aria_label": "Point at a place, or move it with the arrow keys",
        "aria_describedby": "said",
    }
    overlay = Html('<img id="again" alt=""><canvas id="heat" class="heat"></canvas>')
    return tag(
        "div",
        tag("figure", tag("figcaption", "original"), tag("div", image, **stage)),
        tag(
            "figure",
            tag("figcaption", "where it looks", id="title"),
            tag("div", overlay, id="overlay", **stage),
        ),
        class_="look",
    )


def fitted(image: Tensor, side: int) -> Tensor:
    """uint8 (c, h, w), made smaller where its longest side is above `side`."""
    longest = max(image.shape[-2:])
    if longest <= side:
        return image
    height, width = (max(1, round(s * side / longest)) for s in image.shape[-2:])
    return resize(image, (height, width)).round().clamp(0, 255).to(torch.uint8)


def controls() -> Html:
    """What is shown, of which layer and head, how strongly, and the scale of its colours."""

    def choice(name: str, words: str) -> Html:
        return tag("label", words, tag("select", id=name), id=f"{name}-choice")

    opacity = Html('<input id="opacity" type="range" min="0" max="100" value="70">')
    bar = Html('<canvas id="scale" width="256" height="1" aria-hidden="true"></canvas>')
    legend = tag("div", tag("span", "0"), bar, tag("span", "", id="most"), class_="legend")
    return joined(
        [
            tag(
                "div",
                choice("view", "show"),
                choice("layer", "layer"),
                choice("head", "head"),
                choice("class", "class"),
                tag("label", "opacity", opacity),
                class_="controls",
            ),
            legend,
            tag("p", id="said", aria_live="polite"),
        ]
    )


def chances(look: Look) -> Html:
    """The likeliest classes with their probabilities."""
    rows: list[Html] = []
    for name, chance in look.chances:
        bar = Html(f'<i style="width:{100 * chance:.2f}%"></i>')
        rows += [tag("span", name), bar, tag("span", f"{chance:.1%}")]
    return tag("div", *rows, class_="chances")


def notes(look: Look, factor: int) -> Iterable[Html]:
    """What the reader must know about this page."""
    if factor > 1:
        h, w = look.layers[0].grid
        shown = coarser(look.layers[0], factor).grid
        words = f"To keep the page small, {h} × {w} places are joined into {shown[0]} × {shown[1]}."
        yield tag("p", words, class_="soft")
    if look.without:
        yield tag("p", "No relevance for a class: ", look.without, class_="soft")
    if not look.rollout:
        yield tag("p", "No rollout: the layers attend over different grids.", class_="soft")


def joined_cells(layers: Sequence[LayerMaps], budget: int) -> int:
    """The smallest side of the squares of cells to join so that the weights fit `budget`."""

    def size(factor: int) -> int:
        total = 0
        for maps in layers:
            h, w = (-(-side // factor) for side in maps.grid)
            total += len(maps.weights) * (h * w) ** 2
        return total

    factor = 1
    while size(factor) > budget and factor < max(max(maps.grid) for maps in layers):
        factor += 1
    return factor


def coarser(maps: LayerMaps, factor: int) -> LayerMaps:
    """Squares of `factor` × `factor` cells as one: the mean of its queries, the sum of its keys."""
    if factor == 1:
        return maps
    h, w = maps.grid
    cells_h, cells_w = -(-h // factor), -(-w // factor)
    rows, columns = torch.arange(h) // factor, torch.arange(w) // factor
    owner = (rows[:, None] * cells_w + columns).flatten()
    member = torch.nn.functional.one_hot(owner, cells_h * cells_w).to(maps.weights.dtype)
    weights = (member / member.sum(0)).T @ maps.weights @ member
    return LayerMaps(maps.name, (cells_h, cells_w), weights)


def stored(maps: LayerMaps) -> dict[str, Any]:
    """Weights as bytes q with A = row maximum · (q / 255)², JSON-ready."""
    tops = maps.weights.amax(-1)
    share = maps.weights / tops.clamp(min=1e-30).unsqueeze(-1)
    levels = (255 * share.sqrt()).round().to(torch.uint8)
    return {
        "name": maps.name,
        "grid": list(maps.grid),
        "heads": len(maps.weights),
        "values": text_of(levels.numpy().tobytes()),
        "tops": float_text(tops),
    }


def float_text(values: Tensor) -> str:
    """Numbers as little-endian float32 in base64."""
    return text_of(values.float().numpy().astype("<f4").tobytes())


def text_of(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def json_text(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def template(name: str) -> str:
    """A file that travels with the package."""
    return (resources.files("regard.pages") / "templates" / name).read_text(encoding="utf-8")
