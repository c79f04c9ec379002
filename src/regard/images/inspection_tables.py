"""Tables of the inspection page: counts by class, sizes and formats."""

import math
from collections import Counter
from html import escape

from regard.images.data import Data
from regard.images.inspection import Inspection
from regard.images.inspection_pieces import section

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
