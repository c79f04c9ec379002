"""The figures of study.html: curves over the learning rates, and training layer by layer."""

from collections.abc import Callable, Sequence
from statistics import fmean

from regard.study.charts import Band, panel
from regard.study.findings import percent
from regard.study.forms import NAMES
from regard.study.plan import word_of
from regard.study.summary import Cell, Result, Summary
from regard.views.page import Html, tag

# title, the figure of a cell over seeds, logarithmic, percent
CURVES: list[tuple[str, Callable[[Cell], Sequence[float | None]], bool, bool]] = [
    ("Final training loss", lambda c: c.loss, True, False),
    ("Held-out accuracy", lambda c: c.accuracy, False, True),
    ("Largest attention logit", lambda c: c.largest_logit, True, False),
    ("Lowest entropy of a layer at the end, nats", lambda c: c.lowest_entropy, False, False),
    ("Largest gradient norm", lambda c: c.gradient_norm, True, False),
    ("Steps to the accuracy", lambda c: c.steps_to, False, False),
]


def over_rates(summary: Summary, optimizer: str) -> Html:
    """Each figure against the learning rate."""
    figures = []
    for title, figure, log, in_percent in CURVES:
        if "Steps" in title:
            title = (
                f"Steps to {percent(summary.target)} held-out accuracy; none where a seed never did"
            )
        bands = [
            band(form, summary.grid.rates, [figure(found.cells[r]) for r in summary.grid.rates])
            for form, found in summary.forms[optimizer].items()
        ]
        figures.append(
            panel(title, bands, log_x=True, log_y=log, percent=in_percent,
                  x_marks=summary.grid.rates)
        )  # fmt: skip
    return tag("div", *figures, class_="figures")


def band(form: str, x: Sequence[float], over_seeds: Sequence[Sequence[float | None]]) -> Band:
    """Mean, smallest and largest over seeds at each x; a gap where a seed has none."""
    whole = [[v for v in values if v is not None] for values in over_seeds]
    there = [len(w) == len(v) > 0 for w, v in zip(whole, over_seeds, strict=True)]

    def each(of: Callable[[list[float]], float]) -> list[float | None]:
        return [of(w) if ok else None for w, ok in zip(whole, there, strict=True)]

    return Band(form, NAMES[form], x, each(fmean), each(min), each(max))


def multiples(summary: Summary, results: Sequence[Result]) -> list[Html]:
    """Loss, and by layer the largest logit and the entropy, over training at every rate."""
    layers = len(results[0]["points"][0]["entropy"])
    found = [over_training(summary, results, "Training loss", "losses", "loss", None, True)]
    for title, name, log in (
        ("Largest attention logit", "largest_logit", True),
        ("Attention entropy, nats", "entropy", False),
    ):
        by_layer = [
            over_training(
                summary, results, f"{title}, layer {layer + 1}", "points", name, layer, log
            )
            for layer in range(layers)
        ]
        found.append(tag("details", tag("summary", f"{title}, by layer"), *by_layer, open="open"))
    found.append(
        over_training(summary, results, "Gradient norm", "points", "gradient_norm", None, True)
    )
    return found


def over_training(
    summary: Summary,
    results: Sequence[Result],
    title: str,
    series: str,
    name: str,
    layer: int | None,
    log: bool,
) -> Html:
    """A row of small panels, one a rate, on one scale."""

    def values(result: Result) -> dict[float, float | None]:
        return {p["step"]: p[name] if layer is None else p[name][layer] for p in result[series]}

    groups: dict[tuple[str, float], list[dict[float, float | None]]] = {}
    for result in results:
        groups.setdefault((result["form"], result["rate"]), []).append(values(result))
    every = [v for runs in groups.values() for run in runs for v in run.values() if v is not None]
    shown = [v for v in every if v > 0 or not log]  # none where every run diverged at once
    scale = (min(shown), max(shown)) if shown else ()
    panels = []
    for rate in summary.grid.rates:
        bands = []
        for form in summary.grid.forms:
            runs = groups[form, rate]
            steps = sorted(set.intersection(*(set(run) for run in runs)))
            bands.append(band(form, steps, [[run[step] for run in runs] for step in steps]))
        marks = (1, summary.settings.steps)
        panels.append(
            panel(f"{title}, rate {word_of(rate)}", bands, width=300, height=200, log_y=log,
                  x_marks=marks, y_values=scale, small=True)
        )  # fmt: skip
    columns = f"--columns: {len(panels)}"  # the page scales its letters by it, too
    return tag("div", tag("div", *panels, class_="multiples", style=columns), class_="scroll")
