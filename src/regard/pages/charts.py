"""Line charts as inline SVG that follows the page's colours."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from regard.pages.html import Html, safe, tag

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 10, 10, 34
COLOURS = ("var(--one)", "var(--two)")
MOST_POINTS = 300


@dataclass(frozen=True)
class Line:
    """A named line through (x, y) points, x ascending."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def chart(title: str, x_name: str, lines: Sequence[Line], *, percent: bool = False) -> Html:
    """A figure with one or two lines over a common axis, and their last values in the caption."""
    lines = [thinned(line) for line in lines if line.x]
    if not lines:
        return Html("")
    low_x, high_x = span([x for line in lines for x in line.x])
    y_ticks = ticks(*span([y for line in lines for y in line.y]))
    low_y, high_y = y_ticks[0], y_ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)
        return across, TOP + (high_y - y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for value in y_ticks:
        _, at = place(low_x, value)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" '
            'stroke="var(--line)"/>'
            f'<text x="{LEFT - 7}" y="{at + 4:.1f}" text-anchor="end" fill="var(--soft)">'
            f"{label(value, percent)}</text>"
        )
    for value in ticks(low_x, high_x):
        if low_x <= value <= high_x:
            at, _ = place(value, low_y)
            parts.append(
                f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle" '
                f'fill="var(--soft)">{label(value, False)}</text>'
            )
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end" fill="var(--soft)">'
        f"{safe(x_name)[5:-6]}</text>"
    )
    for line, colour in zip(lines, COLOURS, strict=False):
        points = " ".join(
            "{:.1f},{:.1f}".format(*place(x, y)) for x, y in zip(line.x, line.y, strict=True)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8" '
            'stroke-linejoin="round"/>'
        )
        across, at = place(line.x[-1], line.y[-1])
        parts.append(f'<circle cx="{across:.1f}" cy="{at:.1f}" r="3" fill="{colour}"/>')
    drawing = Html(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{safe(title)[5:-6]}">'
        f"{''.join(parts)}</svg>"
    )
    legend = [
        tag("span", f" {line.name} {label(line.y[-1], percent)}", style=f"color: {colour}")
        for line, colour in zip(lines, COLOURS, strict=False)
    ]
    return tag("figure", tag("figcaption", tag("b", title), *legend), drawing)


def thinned(line: Line) -> Line:
    """At most `MOST_POINTS` points: means over runs of equal length."""
    run = math.ceil(len(line.x) / MOST_POINTS)
    starts = range(0, len(line.x), run)
    x = [sum(line.x[i : i + run]) / len(line.x[i : i + run]) for i in starts]
    y = [sum(line.y[i : i + run]) / len(line.y[i : i + run]) for i in starts]
    return Line(line.name, x, y)


def span(values: Sequence[float]) -> tuple[float, float]:
    """Smallest and largest value, a little apart where they are one."""
    low, high = min(values), max(values)
    if high > low:
        return low, high
    reach = abs(low) * 0.1 or 0.5
    return low - reach, high + reach


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers in equal steps of 1, 2 or 5 times a power of ten that span low to high."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def label(value: float, percent: bool) -> str:
    """A short number."""
    if percent:
        return f"{100 * value:.4g}%"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# Line charts with bands as inline SVG, on linear or logarithmic axes.


PANEL_LEFT, PANEL_RIGHT, PANEL_TOP, PANEL_BOTTOM = 48, 12, 10, 24

# Values within so small a factor lie on a linear axis, which has rounder marks.
LEAST_LOG = 3.0


@dataclass(frozen=True)
class Band:
    """A line of means with the range around it; `key` is its colour, and None leaves a gap."""

    key: str
    name: str
    x: Sequence[float]
    mean: Sequence[float | None]
    low: Sequence[float | None]
    high: Sequence[float | None]


@dataclass(frozen=True)
class Axis:
    """A range of values laid on pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    marks: Sequence[float] = field(default_factory=tuple)

    def at(self, value: float) -> float:
        """The pixel of a value; what lies outside is held at the edge."""
        low, high, value = (
            (math.log(v) for v in (self.low, self.high, max(value, self.low)))
            if self.log
            else (self.low, self.high, value)
        )
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return self.start + share * (self.end - self.start)


def axis(values: Sequence[float], start: float, end: float, log: bool) -> Axis:
    """An axis that holds all values, with round marks; logarithmic where they differ enough."""
    low, high = min(values), max(values)
    if log and high >= LEAST_LOG * low:
        return Axis(low, high, start, end, True, log_marks(low, high))
    marks = ticks(*span(values), about=4)
    return Axis(marks[0], marks[-1], start, end, False, marks)


def log_marks(low: float, high: float) -> list[float]:
    """Powers of ten within low and high; where fewer than two, 1, 2 and 5 times them; else ends."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside = lambda marks: [m for m in marks if low * 0.999 <= m <= high * 1.001]  # noqa: E731
    tens = inside([10.0**e for e in exponents])
    if len(tens) > 6:
        return tens[:: math.ceil(len(tens) / 6)]
    fine = inside([m * 10.0**e for e in exponents for m in (1, 2, 5)])
    return tens if len(tens) > 2 else fine if len(fine) > 1 else [low, high]


def short(value: float, percent: bool = False) -> str:
    """A number on an axis."""
    if percent:
        return f"{100 * value:.3g}%"
    if value and (abs(value) < 1e-3 or abs(value) >= 1e5):
        digits, exponent = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def panel(
    title: str,
    bands: Sequence[Band],
    *,
    width: int = 420,
    height: int = 240,
    log_x: bool = False,
    log_y: bool = False,
    percent: bool = False,
    x_marks: Sequence[float] | None = None,
    y_values: Sequence[float] = (),
    small: bool = False,
) -> Html:
    """A figure with one line and band for each form; `y_values` are also held by the axis."""
    xs = [x for band in bands for x in band.x]
    lows = [v for band in bands for v in (*band.low, *band.high) if v is not None]
    ys = [v for v in (*lows, *y_values) if v > 0 or not log_y]
    drawing: list[str] = []
    if xs and ys:
        across = axis(xs, PANEL_LEFT, width - PANEL_RIGHT, log_x)
        up = axis(ys, height - PANEL_BOTTOM, PANEL_TOP, log_y)
        drawing = [
            *grid_lines(across, up, x_marks if x_marks is not None else across.marks, percent),
            *(shape for band in bands for shape in band_shapes(band, across, up, percent)),
        ]
    label = html.escape(title, quote=True)
    picture = (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
        f"{''.join(drawing)}</svg>"
    )
    return tag("figure", tag("figcaption", title), Html(picture), class_="small" if small else None)


def grid_lines(across: Axis, up: Axis, x_marks: Sequence[float], percent: bool) -> list[str]:
    """Horizontal lines with numbers, and the numbers below."""
    parts = []
    for value in up.marks:
        y = up.at(value)
        parts.append(
            f'<line x1="{across.start}" x2="{across.end}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="var(--line)"/>'
            f'<text x="{across.start - 6}" y="{y + 4:.1f}" text-anchor="end" fill="var(--soft)">'
            f"{short(value, percent)}</text>"
        )
    for value in x_marks:
        x = across.at(value)
        parts.append(
            f'<text x="{x:.1f}" y="{up.start + 17:.1f}" text-anchor="middle" '
            f'fill="var(--soft)">{short(value)}</text>'
        )
    return parts


def band_shapes(band: Band, across: Axis, up: Axis, percent: bool) -> list[str]:
    """The range as an area, the means as a line with dots that say their value."""
    parts = []
    for stretch in stretches(band):
        xs = [across.at(band.x[i]) for i in stretch]
        low = [up.at(band.low[i] or 0.0) for i in stretch]
        high = [up.at(band.high[i] or 0.0) for i in stretch]
        mean = [up.at(band.mean[i] or 0.0) for i in stretch]
        edge = [*zip(xs, high, strict=True), *zip(xs[::-1], low[::-1], strict=True)]
        if any(h != w for h, w in zip(high, low, strict=True)):
            parts.append(f'<polygon class="band" points="{places(edge)}"/>')
        parts.append(f'<polyline points="{places(list(zip(xs, mean, strict=True)))}"/>')
    if len(band.x) <= 12:
        for x, value in zip(band.x, band.mean, strict=True):
            if value is not None:
                words = html.escape(f"{band.name}, {short(x)}: {short(value, percent)}")
                parts.append(
                    f'<circle cx="{across.at(x):.1f}" cy="{up.at(value):.1f}" r="3.2">'
                    f"<title>{words}</title></circle>"
                )
    return [f'<g class="form {band.key}">', *parts, "</g>"]


def stretches(band: Band) -> list[list[int]]:
    """Positions of consecutive points that are there."""
    found: list[list[int]] = [[]]
    for i, value in enumerate(band.mean):
        if value is None:
            found.append([])
        else:
            found[-1].append(i)
    return [stretch for stretch in found if stretch]


def places(points: Sequence[tuple[float, float]]) -> str:
    """Points as SVG writes them."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
