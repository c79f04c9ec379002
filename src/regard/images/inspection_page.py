"""The inspection as one self-contained page: no script, no request, light and dark."""

from collections.abc import Iterable
from dataclasses import replace
from html import escape
from pathlib import Path

from regard.files import write_text
from regard.images.decode import to_channels
from regard.images.inspection import Inspection, Place, Twin
from regard.images.inspection_pieces import figure, read_again, section, thumbnail
from regard.images.inspection_style import STYLE
from regard.images.inspection_tables import counts, kinds_of, sizes_of
from regard.images.preprocess import FITS, Preprocess

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
