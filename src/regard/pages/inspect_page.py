"""How the inspection page looks."""

import base64
import io
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from html import escape
from pathlib import Path

from torch import Tensor

from regard._io import write_text
from regard.data.dataset import Data
from regard.data.decode import UnreadableImage, to_channels
from regard.data.inspection import Inspection, Place, Twin
from regard.data.preprocess import FITS, Preprocess

STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#1d1f22;--soft:#63676e;--line:#e3e3df;
--bar:#3b6fb6;--bar2:#7fb0e6;--bar3:#b9c6d6;--bad:#b3261e;--badbg:#fdf0ee}
@media (prefers-color-scheme:dark){:root{--bg:#15171a;--card:#1d2024;--ink:#e8e9ea;--soft:#9aa0a8;
--line:#31353b;--bar:#6ea2e8;--bar2:#3f6ea8;--bar3:#4d5866;--bad:#ff8a80;--badbg:#2c1c1b}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0 0 2px;overflow-wrap:anywhere}
h2{font-size:18px;margin:0 0 2px}
.sub{color:var(--soft);margin:0 0 14px;max-width:70ch}
code{font:13px/1.4 ui-monospace,monospace;overflow-wrap:anywhere}
section{margin-top:36px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.tile b{display:block;font-size:24px;line-height:1.2;font-variant-numeric:tabular-nums}
.tile span{display:block}.tile small{color:var(--soft)}
.tile.bad{border-color:var(--bad);background:var(--badbg)}.tile.bad b{color:var(--bad)}
.notes{margin:18px 0 0;padding:12px 14px 12px 32px;background:var(--card);
border:1px solid var(--line);border-radius:10px}
.fits>input{position:absolute;opacity:0}
.fits>label{display:inline-block;padding:5px 12px;margin:0 6px 12px 0;border:1px solid var(--line);
border-radius:99px;background:var(--card);cursor:pointer;font:13px ui-monospace,monospace}
.fits>input:checked+label{background:var(--bar);border-color:var(--bar);color:var(--bg)}
.fits>input:focus-visible+label{outline:2px solid var(--ink);outline-offset:2px}
.fits>.grid{display:none}
#fit-crop:checked~.fit-crop,#fit-letterbox:checked~.fit-letterbox,
#fit-stretch:checked~.fit-stretch{display:grid}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(96px,1fr));gap:12px}
figure{margin:0;min-width:0}
.grid img{width:100%;height:auto;border-radius:6px;display:block}
.pixels{image-rendering:pixelated}
figcaption{font-size:13px;color:var(--soft);overflow-wrap:anywhere;margin-top:3px}
.pairs{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(300px,100%),1fr));gap:12px}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:10px;background:var(--card);
border:1px solid var(--line);border-radius:10px;padding:10px}
.pair img{height:96px;width:auto;max-width:100%;object-fit:contain;border-radius:6px;display:block}
.pair p{grid-column:1/-1;margin:0;font-size:13px;color:var(--soft)}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th{text-align:left;font-weight:600;color:var(--soft)}
th,td{padding:4px 10px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.name{overflow-wrap:anywhere;min-width:8em}
td.bar{width:45%;min-width:90px;vertical-align:middle}
.bar div{display:flex;height:12px;border-radius:3px;overflow:hidden}
.bar i{display:block}
.train{background:var(--bar)}.val{background:var(--bar2)}.test{background:var(--bar3)}
.key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin:0 5px 0 12px}
svg{max-width:100%;height:auto;display:block}
svg text{fill:var(--soft);font:12px system-ui,sans-serif}
.axis{stroke:var(--line)}.dot{fill:var(--bar);fill-opacity:.55}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(300px,100%),1fr));gap:24px}
.good{color:var(--soft)}
"""


# Pieces of the inspection page: sections, and pictures as data addresses.


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


# Tables of the inspection page: counts by class, sizes and formats.


_CLASSES = 100  # classes shown in the table of counts


def counts(data: Data) -> str:
    titles = list(data.splits)
    counts = {title: Counter(split.labels.tolist()) for title, split in data.splits.items()}
    totals = [sum(counts[title][label] for title in titles) for label in range(len(data.classes))]
    largest = max(totals)
    rows = []
    for label in sorted(range(len(data.classes)), key=lambda k: (-totals[k], k))[:_CLASSES]:
        mine = [counts[title][label] for title in titles]
        parts = "".join(
            f'<i class={title} style="width:{100 * count / largest:.2f}%"></i>'
            for title, count in zip(titles, mine, strict=True)
        )
        numbers = "".join(f"<td class=n>{count:,}</td>" for count in mine)
        rows.append(
            f"<tr><td class=name>{escape(data.classes[label])}</td>{numbers}"
            f"<td class=bar><div>{parts}</div></td></tr>"
        )
    head = "".join(f"<th class=n><i class={title}></i>{title}" for title in titles)
    lead = "Largest class first."
    if len(data.classes) > _CLASSES:
        lead += f" {_CLASSES} of {len(data.classes):,} classes are shown."
    return section(
        "Pictures by class",
        lead,
        f"<div class=wide><table><tr class=key><th>class{head}<th></tr>{''.join(rows)}"
        "</table></div>",
    )


def sizes_of(inspection: Inspection) -> str:
    sizes = Counter((fact.width, fact.height) for fact in inspection.readable())
    if not sizes:
        return ""
    if len(sizes) == 1:
        ((w, h),) = sizes
        return section("Sizes", f"Every picture is {w} × {h} pixels.", "")
    rows = "".join(
        f"<tr><td>{w} × {h}</td><td class=n>{count:,}</td></tr>"
        for (w, h), count in sizes.most_common(12)
    )
    table = f"<table><tr><th>width × height<th class=n>pictures</tr>{rows}</table>"
    return section(
        "Sizes",
        f"{len(sizes):,} different sizes, upright, the commonest listed.",
        f"<div class=two>{_scatter(sizes)}<div>{table}</div></div>",
    )


def _scatter(sizes: Counter[tuple[int, int]]) -> str:
    """Width across, height up, both logarithmic; the area of a dot grows with its pictures."""
    widths, heights = [w for w, _ in sizes], [h for _, h in sizes]
    side, edge = 300, 34
    low = math.log(min(min(widths), min(heights))) - 0.1
    high = math.log(max(max(widths), max(heights))) + 0.1

    def at(value: float) -> float:
        return edge + (math.log(value) - low) / (high - low) * (side - edge - 8)

    most = max(sizes.values())
    dots = "".join(
        f'<circle class=dot cx="{at(w):.1f}" cy="{side - at(h):.1f}" '
        f'r="{2 + 7 * math.sqrt(count / most):.1f}"><title>{w} × {h}: {count:,}</title></circle>'
        for (w, h), count in sizes.most_common(2000)
    )
    ticks = "".join(
        f'<text x="{at(value):.0f}" y="{side - 12}" text-anchor=middle>{value}</text>'
        f'<text x="{edge - 6}" y="{side - at(value) + 4:.0f}" text-anchor=end>{value}</text>'
        for value in (2**k for k in range(20))
        if low <= math.log(value) <= high and (high - low < 4 or value.bit_length() % 2)
    )
    axes = (
        f'<path class=axis fill=none d="M{edge} 6V{side - edge + 4}H{side - 4}"/>'
        f'<text x="{edge + 4}" y=14>height</text>'
        f'<text x="{side - 4}" y="{side - edge - 4}" text-anchor=end>width</text>'
    )
    return (
        f'<svg viewBox="0 0 {side} {side}" width="{side * 1.3:.0f}" role=img '
        f'aria-label="sizes of the pictures">{axes}{ticks}{dots}</svg>'
    )


def kinds_of(inspection: Inspection) -> str:
    kinds = Counter((fact.format, fact.mode) for fact in inspection.readable())
    rows = "".join(
        f"<tr><td>{escape(kind)}</td><td>{escape(mode)}</td><td class=n>{count:,}</td></tr>"
        for (kind, mode), count in kinds.most_common()
    )
    return section(
        "Formats",
        "File format and pixel mode as stored; all are read as 8-bit "
        f"{'grey' if inspection.data.channels == 1 else 'RGB'}.",
        "<div class=wide><table><tr><th>format<th>mode<th class=n>pictures</tr>"
        f"{rows}</table></div>",
    )


# The inspection as one self-contained page: no script, no request, light and dark.


_SAMPLES = 24  # pictures shown as the model sees them
_LISTED = 50  # entries shown of each list; the quarantine list holds all


def write_inspection_page(inspection: Inspection, preprocess: Preprocess, path: str | Path) -> None:
    """Write the page. `preprocess` says at what size, and first with which fit, samples show."""
    data = inspection.data
    body = "".join(
        (
            _head(inspection),
            _notes(inspection.notes),
            _samples(inspection, preprocess),
            _unreadable(inspection),
            _twins(
                inspection,
                inspection.leaks,
                "Shown in two splits",
                "A held-out picture that is also trained on makes the score look better than it "
                "is. Each stands beside its most similar picture of an earlier split.",
                "No held-out picture is shown in an earlier split.",
            ),
            _twins(
                inspection,
                inspection.conflicts,
                "Labels that disagree",
                "Two pictures show the same but carry different labels; one label is wrong, or "
                "the classes overlap.",
                "No two pictures that show the same carry different labels.",
            ),
            _groups(inspection),
            counts(data),
            sizes_of(inspection),
            kinds_of(inspection),
        )
    )
    title = f"Inspection of {data.name}"
    write_text(
        path,
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{body}</main></body></html>\n",
    )


def _head(inspection: Inspection) -> str:
    data = inspection.data
    total = sum(len(split) for split in data.splits.values())
    splits = ", ".join(f"{len(split):,} {title}" for title, split in data.splits.items())
    extra = sum(len(group) - 1 for group in inspection.duplicates)
    tiles = (
        (f"{total:,}", "pictures", splits, False),
        (f"{len(data.classes):,}", "classes", "matched by name", False),
        _tile(len(inspection.unreadable), "unreadable", "to be quarantined"),
        _tile(len(inspection.leaks), "shown in two splits", "held out, but also trained on"),
        _tile(len(inspection.conflicts), "labels disagree", "on the same picture"),
        (f"{extra:,}", "exact duplicates", "beyond the first of each", False),
    )
    cards = "".join(
        f'<div class="tile{" bad" if bad else ""}"><b>{number}</b><span>{what}</span>'
        f"<small>{escape(more)}</small></div>"
        for number, what, more, bad in tiles
    )
    return (
        f"<h1>{escape(data.name)}</h1><p class=sub>What the scan found before training. "
        f"Fingerprint <code>{data.fingerprint[:12]}</code></p><div class=tiles>{cards}</div>"
    )


def _tile(count: int, what: str, more: str) -> tuple[str, str, str, bool]:
    return f"{count:,}", what, more if count else "none found", count > 0


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<ul class=notes>{items}</ul>" if items else ""


def _samples(inspection: Inspection, preprocess: Preprocess) -> str:
    """Radio buttons choose the fit, without a script."""
    h, w = preprocess.size
    order = (preprocess.fit, *(fit for fit in FITS if fit != preprocess.fit))
    places = _choose(inspection)
    tabs = "".join(
        f'<input type=radio name=fit id="fit-{fit}"{" checked" if n == 0 else ""}>'
        f'<label for="fit-{fit}">--fit {fit}</label>'
        for n, fit in enumerate(order)
    )
    grids = "".join(
        f'<div class="grid fit-{fit}">'
        + "".join(_sample(inspection, replace(preprocess, fit=fit), place) for place in places)
        + "</div>"
        for fit in order
    )
    lead = (
        f"Samples of the training split as a model of {h} × {w} pixels will see them"
        f"{', in grey' if preprocess.channels == 1 else ''}, before normalising."
    )
    return section("As the model sees them", lead, f"<div class=fits>{tabs}{grids}</div>")


def _choose(inspection: Inspection) -> list[Place]:
    """Training pictures of as many classes as there is room for, in turn."""
    facts, labels = inspection.facts["train"], inspection.data.splits["train"].labels.tolist()
    by_class: dict[int, list[int]] = {}
    for i, label in enumerate(labels):
        if not facts[i].reason:
            by_class.setdefault(label, []).append(i)
    each = max(1, min(3, _SAMPLES // max(1, len(by_class))))
    chosen: list[Place] = []
    for label in sorted(by_class)[:_SAMPLES]:
        mine = by_class[label]
        picks = sorted({round(k * (len(mine) - 1) / max(1, each - 1)) for k in range(each)})
        chosen += [Place("train", mine[k]) for k in picks]
    return chosen


def _sample(inspection: Inspection, preprocess: Preprocess, place: Place) -> str:
    picture = read_again(inspection, place)
    if picture is None:
        return ""
    shown = preprocess.shown(to_channels(picture, preprocess.channels))
    return figure(shown, inspection.label(place), inspection.name(place))


def _unreadable(inspection: Inspection) -> str:
    rows = "".join(
        f"<tr><td class=name><code>{escape(inspection.name(place))}</code></td>"
        f"<td>{place.split}</td><td>{escape(inspection.label(place))}</td>"
        f"<td class=name>{escape(inspection.fact(place).reason)}</td></tr>"
        for place in inspection.unreadable[:_LISTED]
    )
    if not rows:
        return section("Unreadable", "Every picture can be read.", "")
    table = (
        "<div class=wide><table><tr><th>file<th>split<th>class<th>reason</tr>"
        f"{rows}</table></div>{_more(len(inspection.unreadable))}"
    )
    return section(
        "Unreadable",
        "These are on the quarantine list. Met in training, a picture that cannot be read is "
        "counted and named, and carries weight zero.",
        table,
    )


def _more(count: int) -> str:
    if count <= _LISTED:
        return ""
    return f"<p class=sub>{_LISTED} of {count:,} are shown; the quarantine list holds all.</p>"


def _twins(
    inspection: Inspection, twins: tuple[Twin, ...], title: str, lead: str, none: str
) -> str:
    if not twins:
        return section(title, none, "")
    pairs = "".join(
        f"<div class=pair>{thumbnail(inspection, twin.first)}"
        f"{thumbnail(inspection, twin.second)}<p>{_likeness(twin)}</p></div>"
        for twin in twins[:_LISTED]
    )
    return section(title, lead, f"<div class=pairs>{pairs}</div>{_more(len(twins))}")


def _likeness(twin: Twin) -> str:
    return "the same pixels" if twin.similarity == 1 else f"similarity {twin.similarity:.4f}"


def _groups(inspection: Inspection) -> str:
    groups = inspection.duplicates
    if not groups:
        return section("Exact duplicates", "No two pictures have the same pixels.", "")
    rows = "".join(
        "<tr><td class=name>"
        + "<br>".join(f"<code>{escape(inspection.name(place))}</code>" for place in group[:6])
        + (f"<br>and {len(group) - 6} more" if len(group) > 6 else "")
        + f"</td><td class=n>{len(group)}</td></tr>"
        for group in groups[:_LISTED]
    )
    return section(
        "Exact duplicates",
        "Files with the same pixels, however they were saved.",
        f"<div class=wide><table><tr><th>files<th class=n>copies</tr>{rows}</table></div>"
        f"{_more(len(groups))}",
    )
