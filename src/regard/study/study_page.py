"""The figures of study.html: curves over the learning rates, and training layer by layer."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from regard._io import write_text
from regard.errors import counted
from regard.pages.charts import Band, panel
from regard.pages.html import Html, cards, facts, page, section, table, tag
from regard.study.findings import (
    OPTIMIZER_NAMES,
    Cell,
    Result,
    Summary,
    comparisons,
    number,
    percent,
    questions,
    statements,
)
from regard.study.plan import NAMES, Plan, StudyFolder, word_of
from regard.training.metrics import to_csv

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


# The tables of study.html: the figures of every form, and every comparison.


def form_table(summary: Summary, optimizer: str) -> Html:
    """One row a form."""
    high, low = (word_of(of(summary.grid.rates)) for of in (max, min))
    columns = [
        "form", "sensitivity", "best rate", "accuracy there", f"accuracy at {high}",
        f"loss at {low}", f"largest logit at {high}", f"entropy at {high}", "diverged",
    ]  # fmt: skip
    rows = [
        (
            NAMES[form],
            spread(found.sensitivity, number),
            word_of(found.best_rate),
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
        where = "" if question.name == "sensitivity" else f" {question.name}"
        for form, c in comparisons(summary, optimizer, question).items():
            margin = "unknown" if c.margin is None else f"± {question.show(c.margin)}"
            verdict = "unknown" if c.margin is None else "yes" if c.clear else "no"
            sign = "+" if c.difference >= 0 else "−"
            shown = f"{sign}{question.show(abs(c.difference))}"
            rows.append((f"{question.quantity}{where}", NAMES[form], shown, margin, verdict))
    columns = ["quantity", "form", "difference", "spread", "larger than the spread"]
    rows = [(row[0].removeprefix("the "), *row[1:]) for row in rows]
    return table(columns, rows, text=2)


# study.html: the answer, curves over the rates, the table, and training layer by layer.


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
.scroll { overflow-x: auto; } .multiples { display: grid; gap: .5rem; min-width: 46rem;
  grid-template-columns: repeat(var(--columns), 1fr); }
.multiples figure { padding: .35rem .4rem; } .multiples figcaption { font-size: .78rem; margin: 0; }
.multiples svg { font-size: clamp(9px, calc(3.6px * var(--columns)), 15px); }
.answer { max-width: 52rem; }
.answer ul { margin: .3rem 0; padding-left: 1.2rem; } .answer li { margin: .2rem 0; }
.cards { grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); }
.answer b { display: block; font-size: 1.15rem; line-height: 1.35; margin: .6rem 0 .3rem; }
.wide th { white-space: normal; overflow-wrap: normal; vertical-align: bottom; }
.wide td { white-space: nowrap; }
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


def study_page(summary: Summary, results: Sequence[Result], command: str) -> str:
    """The page, from figures alone."""
    settings = summary.settings
    title = f"Does QK norm help on {Path(settings.data).name}?"
    parts: list[Any] = [STYLE, tag("h1", title), tag("p", about(summary), class_="soft")]
    for optimizer in summary.grid.optimizers:
        parts += [
            answer(summary, optimizer),
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


def answer(summary: Summary, optimizer: str) -> Html:
    """The conclusion, its first sentence large and what it rests on listed."""
    first, *rest = statements(summary, optimizer)
    return tag(
        "div", tag("b", first), tag("ul", *(tag("li", text) for text in rest)), class_="answer"
    )


def about(summary: Summary) -> str:
    """One line: what was run."""
    s, g = summary.settings, summary.grid
    optimizers = " and ".join(OPTIMIZER_NAMES[o] for o in g.optimizers)
    return (
        f"{counted(len(g.runs()), 'run')}: {counted(len(g.forms), 'form')}, "
        f"{counted(len(g.rates), 'learning rate')}, "
        f"{counted(g.seeds, 'seed')}, {optimizers}; {s.model['name']}, "
        f"{counted(s.steps, 'step')} of {s.batch_size} images, {s.images:,} to train on and "
        f"{s.held_out:,} held out"
    )


def limits(summary: Summary) -> Html:
    """What the answer must not be taken for."""
    return tag(
        "p",
        "This is about a model of this size, trained for so many steps on these images, without "
        "augmentation or clipping of gradients. “Spread” is the 95% interval of a difference over "
        f"{counted(summary.grid.seeds, 'seed')}; about one comparison in twenty exceeds it by "
        "chance.",
        class_="soft",
    )


def legend(summary: Summary) -> Html:
    """Buttons that hide and show each form in all curves."""
    buttons = (
        tag("button", NAMES[form], class_=form, type="button", aria_pressed="true")
        for form in summary.grid.forms
    )
    return tag("div", *buttons, class_="legend")


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
        ("rates", ", ".join(word_of(rate) for rate in g.rates)),
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


# What a finished study writes: study.json, study.csv and study.html.


def write_results(
    folder: StudyFolder, plan: Plan, summary: Summary, results: list[dict[str, Any]]
) -> None:
    """study.json with everything, study.csv with one row a run, study.html to look at."""
    folder.write_plan(plan, summary=summary.to_dict(), runs=results)
    write_text(folder.csv_file, csv_of(summary, results))
    write_text(folder.page_file, study_page(summary, results, command_of(plan)))


COLUMNS = (
    "optimizer", "form", "rate", "seed", "initial_loss", "final_loss", "accuracy", "held_out_loss",
    "diverged_at", "largest_logit", "lowest_entropy", "gradient_norm", "steps_to_target", "seconds",
)  # fmt: skip


def csv_of(summary: Summary, results: list[dict[str, Any]]) -> str:
    """One row a run; empty where a run diverged or never reached the accuracy."""
    rows = []
    for r in results:
        found = summary.forms[r["optimizer"]][r["form"]].cells[r["rate"]]
        seed = r["seed"]
        more = {
            "largest_logit": found.largest_logit[seed],
            "lowest_entropy": found.lowest_entropy[seed],
            "gradient_norm": found.gradient_norm[seed],
            "steps_to_target": found.steps_to[seed],
        }
        rows.append([{**r, **more}[column] for column in COLUMNS])
    return to_csv(COLUMNS, rows)


def command_of(plan: Plan) -> str:
    """The command that makes this study."""
    s, g = plan.settings, plan.grid
    options: dict[str, Any] = {
        "rates": ",".join(word_of(rate) for rate in g.rates),
        "forms": ",".join(g.forms),
        "seeds": g.seeds,
        "optimizer": ",".join(g.optimizers),
        "steps": s.steps,
        "batch-size": s.batch_size,
        "warmup": s.warmup,
        "weight-decay": s.weight_decay,
        "images": s.most_images,
    }
    height, width = s.model["image_size"]
    own = ["--like", s.like] if s.like is not None else [
        s.data, "--model", s.model["name"], "--image-size", str(height), str(width),
    ]  # fmt: skip
    words = ["regard", "study", *own, *(w for k, v in options.items() for w in (f"--{k}", str(v)))]
    return shlex.join(words)
