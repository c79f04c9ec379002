"""study.html: the answer, curves over the rates, the table, and training layer by layer."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from regard.errors import counted
from regard.study.figures import multiples, over_rates
from regard.study.findings import OPTIMIZER_NAMES, number, percent, statements
from regard.study.forms import NAMES
from regard.study.plan import word_of
from regard.study.summary import Result, Summary
from regard.study.tables import comparison_table, form_table
from regard.views.page import Html, cards, facts, page, section, tag

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
