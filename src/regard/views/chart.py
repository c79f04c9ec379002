"""Line charts as inline SVG that follows the page's colours."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from regard.views.page import Html, safe, tag

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
