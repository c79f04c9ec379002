"""study.html: the answer, curves over the rates, the table, and training layer by layer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from regard.study.charts import Band, panel
from regard.study.findings import (
    OPTIMIZER_NAMES,
    comparisons,
    conclusion,
    number,
    percent,
    questions,
)
from regard.study.forms import NAMES
from regard.study.summary import Cell, Result, Summary
from regard.views.page import Html, cards, facts, page, section, table, tag

STYLE = Html("""<style>
:root { --none: #c4401b; --cap: #a87600; --unit: #2463c9; --rms: #0b8468; --layer: #8a4fbf; }
@media (prefers-color-scheme: dark) { :root { --none: #ff8d61; --cap: #e3bb4d; --unit: #7aaeff;
  --rms: #45cfa5; --layer: #c99cf5; } }
.none { --ink: var(--none); } .cap { --ink: var(--cap); } .unit { --ink: var(--unit); }
.rms { --ink: var(--rms); } .layer { --ink: var(--layer); }
.form polyline { fill: none; stroke: var(--ink); stroke-width: 1.9; stroke-linejoin: round; }
.cap polyline { stroke-dasharray: 7 3; } .rms polyline { stroke-dasharray: 3 2; }
.form circle { fill: var(--ink); } .band { fill: var(--ink); opacity: .16; }
.legend { display: flex; flex-wrap: wrap; gap: .4rem; margin: .6rem 0; position: sticky; top: 0;
  background: var(--back); padding: .4rem 0; z-index: 1; }
.legend button { font: inherit; font-size: .9rem; color: var(--text); background: var(--card);
  border: 1px solid var(--line); border-radius: 1rem; padding: .15rem .8rem; cursor: pointer; }
.legend button::before { content: ""; display: inline-block; width: 1.2em; height: .28em;
  margin-right: .5em; vertical-align: middle; border-radius: 1em; background: var(--ink); }
.legend button[aria-pressed=false] { opacity: .45; text-decoration: line-through; }
.scroll { overflow-x: auto; } .multiples { display: grid; gap: .5rem; min-width: 46rem; }
.multiples figure { padding: .35rem .4rem; } .multiples figcaption { font-size: .78rem; margin: 0; }
.multiples svg { font-size: 15px; } .answer { font-size: 1.05rem; max-width: 48rem; }
summary { cursor: pointer; font-weight: 600; }
</style>""")

SCRIPT = Html("""<script>
for (const button of document.querySelectorAll(".legend button"))
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    for (const twin of document.querySelectorAll(`.legend button.${button.className}`))
      twin.setAttribute("aria-pressed", shown);
    for (const form of document.querySelectorAll(`g.form.${button.className}`))
      form.style.display = shown ? "" : "none";
  });
</script>""")

# title, the figure of a cell over seeds, logarithmic, percent
CURVES: list[tuple[str, Callable[[Cell], Sequence[float | None]], bool, bool]] = [
    ("Final training loss", lambda c: c.loss, True, False),
    ("Held-out accuracy", lambda c: c.accuracy, False, True),
    ("Largest attention logit", lambda c: c.largest_logit, True, False),
    ("Lowest entropy of a layer at the end, nats", lambda c: c.lowest_entropy, False, False),
    ("Largest gradient norm", lambda c: c.gradient_norm, True, False),
    ("Steps to the accuracy", lambda c: c.steps_to, False, False),
]


def study_page(summary: Summary, results: Sequence[Result], command: str) -> str:
    """The page, from figures alone."""
    settings = summary.settings
    title = f"Does QK norm help on {Path(settings.data).name}?"
    parts: list[Any] = [STYLE, tag("h1", title), tag("p", about(summary), class_="soft")]
    for optimizer in summary.grid.optimizers:
        parts += [
            tag("p", conclusion(summary, optimizer), class_="answer"),
            tag("p", "Sensitivity to the learning rate, lower is better", class_="soft"),
            key_figures(summary, optimizer),
        ]
    parts += [limits(summary), legend(summary)]
    for optimizer in summary.grid.optimizers:
        own = [r for r in results if r["optimizer"] == optimizer]
        named = OPTIMIZER_NAMES[optimizer]
        parts += [
            section(f"Against the learning rate, {named}", over_rates(summary, optimizer)),
            section(f"In numbers, {named}", form_table(summary, optimizer)),
            section(f"Compared with {NAMES[summary.baseline]}, {named}",
                    comparison_table(summary, optimizer)),
            section(f"During training, {named}", *multiples(summary, own)),
        ]  # fmt: skip
    parts += [section("How it was measured", method(summary, command)), SCRIPT]
    return page(title, *parts)


def about(summary: Summary) -> str:
    """One line: what was run."""
    s, g = summary.settings, summary.grid
    return (
        f"{len(g.runs())} runs: {len(g.forms)} forms, {len(g.rates)} learning rates, {g.seeds} "
        f"seeds, {' and '.join(OPTIMIZER_NAMES[o] for o in g.optimizers)}; {s.model['name']}, "
        f"{s.steps} steps of {s.batch_size} images, {s.images:,} to train on and {s.held_out:,} "
        "held out"
    )


def limits(summary: Summary) -> Html:
    """What the paragraph must not be taken for."""
    return tag(
        "p",
        "This is about a model of this size, trained for so many steps on these images, without "
        "augmentation or clipping of gradients. “Spread” is the 95% interval of a difference over "
        f"{summary.grid.seeds} seeds; about one comparison in twenty exceeds it by chance.",
        class_="soft",
    )


def legend(summary: Summary) -> Html:
    """Buttons that hide and show each form in all curves."""
    buttons = (
        tag("button", NAMES[form], class_=form, type="button", aria_pressed="true")
        for form in summary.grid.forms
    )
    return tag("div", *buttons, class_="legend")


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


def form_table(summary: Summary, optimizer: str) -> Html:
    """One row a form."""
    high, low = max(summary.grid.rates), min(summary.grid.rates)
    columns = [
        "form", "sensitivity", "best rate", "accuracy there", f"accuracy at {high:g}",
        f"loss at {low:g}", f"largest logit at {high:g}", f"entropy at {high:g}", "diverged",
    ]  # fmt: skip
    rows = [
        (
            NAMES[form],
            spread(found.sensitivity, number),
            f"{found.best_rate:g}",
            spread(found.best.accuracy, percent),
            spread(found.highest.accuracy, percent),
            spread(found.lowest.loss, number),
            spread(found.highest.largest_logit, number),
            spread(found.highest.lowest_entropy, number),
            f"{found.diverged} of {found.runs}",
        )
        for form, found in summary.forms[optimizer].items()
    ]
    return tag("div", table(columns, rows), tag("p", SPREAD_WORDS, class_="soft"))


SPREAD_WORDS = (
    "Mean over seeds ± standard deviation. Sensitivity is learning-rate sensitivity: the mean over "
    "the rates of min(final loss, initial loss), less the best of these; lower is better. Entropy "
    "is that of the layer where it is lowest, at the end."
)


def spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """Mean ± standard deviation."""
    mean = show(fmean(values))
    return f"{mean} ± {show(stdev(values))}" if len(values) > 1 else mean


def comparison_table(summary: Summary, optimizer: str) -> Html:
    """Every comparison, whether it is larger than the spread or not."""
    rows = []
    for question in questions(summary):
        for form, c in comparisons(summary, optimizer, question).items():
            margin = "unknown" if c.margin is None else f"± {question.show(c.margin)}"
            verdict = "yes" if c.clear else "no"
            sign = "+" if c.difference >= 0 else "−"
            shown = f"{sign}{question.show(abs(c.difference))}"
            rows.append((f"{question.quantity} {question.name}".replace(" sensitivity", ""),
                         NAMES[form], shown, margin, verdict))  # fmt: skip
    columns = ["quantity", "form", "difference", "spread", "larger than the spread"]
    return table(columns, rows, text=2)


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
    scale = (min(v for v in every if v > 0 or not log), max(every))
    panels = []
    for rate in summary.grid.rates:
        bands = []
        for form in summary.grid.forms:
            runs = groups[form, rate]
            steps = sorted(set.intersection(*(set(run) for run in runs)))
            bands.append(band(form, steps, [[run[step] for run in runs] for step in steps]))
        marks = (1, summary.settings.steps)
        panels.append(
            panel(f"{title}, rate {rate:g}", bands, width=300, height=200, log_y=log,
                  x_marks=marks, y_values=scale, small=True)
        )  # fmt: skip
    columns = f"grid-template-columns: repeat({len(panels)}, 1fr)"
    return tag("div", tag("div", *panels, class_="multiples", style=columns), class_="scroll")


def method(summary: Summary, command: str) -> Html:
    """What was done, so that it can be done again."""
    s, g = summary.settings, summary.grid
    options = {k: v for k, v in s.model.items() if k not in ("name", "num_classes")}
    shown = ", ".join(f"{k} {v}" for k, v in options.items())
    items = [
        ("command", command),
        (
            "images",
            f"{s.data}: {s.images:,} to train on, {s.held_out:,} held out, {s.classes} classes",
        ),
        ("model", f"{s.model['name']}; {shown}"),
        ("like", s.like),
        ("schedule", f"{s.steps} steps of {s.batch_size} images, warm-up {s.warmup:.0%}, cosine"),
        ("rates", ", ".join(f"{rate:g}" for rate in g.rates)),
        ("weight decay", s.weight_decay),
        ("soft cap", f"{s.cap:g} · tanh(logit / {s.cap:g}), without QK norm"),
        ("number format", "float32"),
        ("final loss", "mean training loss of the last tenth of the steps"),
        ("guessing", f"{percent(s.chance)} accuracy, which stands for a run that diverged"),
        ("sensitivity", "Wortsman et al. 2023, arXiv 2309.14322"),
    ]
    return facts([(k, v) for k, v in items if v is not None])


def key_figures(summary: Summary, optimizer: str) -> Html:
    """Sensitivity of every form, large."""
    forms = summary.forms[optimizer]
    return cards((NAMES[f], number(fmean(found.sensitivity))) for f, found in forms.items())
