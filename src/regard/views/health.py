"""Attention health by layer over training, for the report."""

import html
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from regard.record import colour
from regard.views.page import Html, joined, section, tag

# Width of the strips and height of a layer's row, in units of the drawing.
WIDTH, ROW, NAMES, FOOT = 420, 14, 26, 18
MOST_COLUMNS = 120


class Measure(NamedTuple):
    """A number that `attention_health` gives of each attention."""

    key: str
    title: str
    meaning: str


MEASURES = (
    Measure(
        "entropy", "Entropy", "in nats, mean over heads and queries; 0 is attention on one place"
    ),
    Measure("largest_logit", "Largest logit", "growth without bound foretells an unstable run"),
    Measure("q_gain", "Gain of the queries' norm", "1 at the start"),
    Measure("k_gain", "Gain of the keys' norm", "1 at the start"),
)


def attention_section(lines: Sequence[dict[str, Any]]) -> Html:
    """Strips by layer (down) and epoch (across) from metrics lines that have "attention"; empty
    markup where none has.

    "attention" maps module names to numbers, as `attention_health` gives them.
    """
    lines = thinned([line for line in lines if line.get("attention")])
    if not lines:
        return Html("")
    names = list(lines[-1]["attention"])
    strips = [strip(measure, names, lines) for measure in MEASURES]
    listed = ", ".join(f"{i}: {name}" for i, name in enumerate(names, start=1))
    return section(
        "Attention health",
        tag("p", "A row for each layer, first on top; time from left to right.", class_="soft"),
        tag("div", *strips, class_="figures"),
        tag("details", tag("summary", f"{len(names)} layers"), tag("p", listed)),
    )


def thinned(lines: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """At most `MOST_COLUMNS` of the lines, evenly, the last among them."""
    step = -(-len(lines) // MOST_COLUMNS)
    return lines[::-1][::step][::-1] if step > 1 else lines


def strip(measure: Measure, names: Sequence[str], lines: Sequence[dict[str, Any]]) -> Html:
    """One number as coloured cells, with its range in the caption; empty where no layer has it."""
    table = [[line["attention"].get(name, {}).get(measure.key) for line in lines] for name in names]
    values = [value for row in table for value in row if value is not None]
    if not values:
        return Html("")
    low, high = min(values), max(values)
    last = [row[-1] for row in table if row[-1] is not None]
    caption = tag(
        "figcaption",
        tag("b", measure.title),
        f" {low:.3g} (dark) to {high:.3g} (light), now {min(last):.3g} to {max(last):.3g}; "
        f"{measure.meaning}",
    )
    return tag("figure", caption, cells(measure, names, lines, table, shade(low, high)))


def shade(low: float, high: float) -> Callable[[float], str]:
    """From a value to its colour."""
    scale = colour.scale()
    reach = high - low or 1.0

    def of(value: float) -> str:
        red, green, blue = scale[round(255 * (value - low) / reach)].tolist()
        return f"rgb({red} {green} {blue})"

    return of


def cells(
    measure: Measure,
    names: Sequence[str],
    lines: Sequence[dict[str, Any]],
    table: Sequence[Sequence[float | None]],
    colour_of: Callable[[float], str],
) -> Html:
    """The drawing: a rectangle for each layer and time, its number in its title."""
    step = (WIDTH - NAMES) / len(lines)
    parts = []
    for i, (name, row) in enumerate(zip(names, table, strict=True)):
        y = i * ROW
        parts.append(
            f'<text x="{NAMES - 5}" y="{y + 11}" text-anchor="end" fill="var(--soft)" '
            f'font-size="11">{i + 1}</text>'
        )
        for j, value in enumerate(row):
            if value is not None:
                words = html.escape(f"{name}, step {lines[j]['step']}: {value:.4g}")
                parts.append(
                    f'<rect x="{NAMES + j * step:.2f}" y="{y}" width="{step + 0.3:.2f}" '
                    f'height="{ROW - 1}" fill="{colour_of(value)}"><title>{words}</title></rect>'
                )
    foot = len(names) * ROW + FOOT - 4
    for x, anchor, line in ((NAMES, "start", lines[0]), (WIDTH, "end", lines[-1])):
        parts.append(
            f'<text x="{x}" y="{foot}" text-anchor="{anchor}" fill="var(--soft)">'
            f"step {int(line['step'])}</text>"
        )
    label = html.escape(f"{measure.title} by layer over training")
    box = f"0 0 {WIDTH} {len(names) * ROW + FOOT}"
    return Html(
        f'<svg viewBox="{box}" role="img" aria-label="{label}" shape-rendering="crispEdges">'
        f"{joined(map(Html, parts))}</svg>"
    )
