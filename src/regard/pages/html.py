"""Self-contained HTML pages: text made safe, tables, pictures, a style for light and dark.

Everything that is not `Html` already is text and is escaped, so a class named `<b>` is shown as
such. A page refers to nothing outside itself.
"""

import base64
import html
import io
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.errors import MissingExtraError

SMALL = 64  # pictures up to this side are stored exactly and shown with square pixels

STYLE = """
:root { color-scheme: light dark; --back: #fbfbfa; --card: #fff; --text: #1d1f23; --soft: #666c76;
  --line: #dcdde1; --one: #2463c9; --two: #c4501b; --good: 36 99 201; --bad: 205 60 30; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14161a; --card: #1c1f25; --text: #e6e7ea; --soft: #9aa1ad; --line: #343943;
    --one: #7aaeff; --two: #ff9a66; --good: 90 150 255; --bad: 255 110 70; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 66rem; background: var(--back);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; line-height: 1.25; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .4rem 0; max-width: 45rem; } .soft { color: var(--soft); }
.cards, .figures, .pictures { display: grid; gap: .8rem; }
.cards { grid-template-columns: repeat(auto-fit, minmax(max(9rem, 22%), 1fr)); margin: .8rem 0; }
.figures { grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); }
.pictures { grid-template-columns: repeat(auto-fill, minmax(6.2rem, 1fr)); }
.cards > div, figure { background: var(--card); border: 1px solid var(--line);
  border-radius: .6rem; padding: .7rem .9rem; margin: 0; }
.cards b { display: block; font-size: 1.5rem; line-height: 1.2; font-weight: 600; }
.cards span { color: var(--soft); font-size: .87rem; }
figcaption { font-size: .9rem; margin-bottom: .3rem; }
svg { display: block; width: 100%; height: auto; font: 13px system-ui, sans-serif; }
.wide { overflow-x: auto; margin: .6rem 0; } .wide td { overflow-wrap: break-word; }
details { margin: .6rem 0; }
table { border-collapse: collapse; font-size: .93rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .6rem; border-bottom: 1px solid var(--line); text-align: left; }
th { font-weight: 600; } th, .n { white-space: nowrap; overflow-wrap: normal; }
.n { text-align: right; }
td { min-width: 4rem; }
.matrix table { border-collapse: separate; border-spacing: 2px; }
.matrix th, .matrix td { border: 0; padding: .25rem .35rem; }
.matrix td { text-align: center; min-width: 2.1rem; border-radius: .25rem; }
.matrix thead th { text-align: center; vertical-align: bottom; }
.matrix tbody th { max-width: 10rem; overflow: hidden; text-overflow: ellipsis; }
.matrix .turned { writing-mode: vertical-rl; transform: rotate(180deg); max-height: 9rem;
  overflow: hidden; }
.pictures figure { padding: .4rem; font-size: .85rem; line-height: 1.35; }
.pictures img { width: 100%; aspect-ratio: 1; object-fit: contain; border-radius: .3rem;
  display: block; margin-bottom: .3rem; background: rgb(128 128 128 / .12); }
.heat img { display: block; width: 100%; max-width: 40rem; }
img.exact { image-rendering: pixelated; }
.wrong { color: var(--two); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0;
  font-size: .93rem; }
dt { color: var(--soft); } dd { margin: 0; }
@media (max-width: 32rem) {
  th, td { padding: .28rem .3rem; font-size: .87rem; } td { min-width: 2.2rem; }
  .matrix th, .matrix td { padding: .2rem .1rem; } .matrix td { min-width: 1.75rem; } }
"""


#: Stands in every page, and says whose it is.
GENERATOR = '<meta name="generator" content="regard">'


class Html(str):
    """Markup that is safe to put into a page as it is."""

    __slots__ = ()


def safe(value: Any) -> Html:
    """`value` as markup: Html stays, all else is text, isolated from the text around it."""
    if isinstance(value, Html):
        return value
    return Html(f"<bdi>{html.escape(str(value))}</bdi>")


def joined(parts: Iterable[Any]) -> Html:
    """The parts one after the other."""
    return Html("".join(safe(part) for part in parts))


def tag(name: str, *content: Any, **attributes: Any) -> Html:
    """An element; `class_` is its class, other attributes go by their names."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>{joined(content)}</{name}>")


def page(title: str, *sections: Any) -> str:
    """A whole document."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{GENERATOR}\n<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{joined(sections)}\n</body>\n</html>\n"
    )


def section(title: str, *content: Any) -> Html:
    """A heading and what is under it."""
    return tag("section", tag("h2", title), *content)


def cards(items: Iterable[tuple[str, Any]]) -> Html:
    """Large numbers, each with what it is."""
    return tag("div", *(tag("div", tag("b", v), tag("span", k)) for k, v in items), class_="cards")


def facts(items: Iterable[tuple[str, Any]]) -> Html:
    """Names and values, one pair a line."""
    return tag("dl", *(part for k, v in items for part in (tag("dt", k), tag("dd", v))))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, text: int = 1) -> Html:
    """A table whose first `text` columns are text and the others numbers; wide ones scroll."""
    kind = ["" if i < text else "n" for i in range(len(columns))]
    head = tag("tr", *(tag("th", c, class_=k or None) for c, k in zip(columns, kind, strict=True)))
    body = [
        tag("tr", *(tag("td", c, class_=k or None) for c, k in zip(row, kind, strict=True)))
        for row in rows
    ]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="wide")


def picture(image: Tensor, alt: str) -> Html:
    """uint8 (c, h, w), c 1 or 3, as an embedded picture: exact where small, else JPEG."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("pillow", "train", "a page with pictures") from None
    array = image.permute(1, 2, 0).contiguous().numpy()  # c h w -> h w c
    whole = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    exact = max(image.shape[-2:]) <= SMALL
    data = io.BytesIO()
    if exact:
        whole.save(data, "PNG")
    else:
        whole.save(data, "JPEG", quality=85)
    kind = "png" if exact else "jpeg"
    source = f"data:image/{kind};base64,{base64.b64encode(data.getvalue()).decode()}"
    shown = f'<img src="{source}" alt="{html.escape(alt)}"'
    return Html(f'{shown} class="exact">' if exact else f"{shown}>")


def heat(values: Tensor, alt: str) -> Html:
    """A matrix with values in 0..1 as a picture, one pixel an entry, white to blue."""
    white, blue = torch.tensor([250.0, 250.0, 250.0]), torch.tensor([20.0, 60.0, 150.0])
    colours = white + values.float().unsqueeze(-1) * (blue - white)
    return picture(colours.round().to(torch.uint8).permute(2, 0, 1), alt)
