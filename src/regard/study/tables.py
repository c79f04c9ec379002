"""The tables of study.html: the figures of every form, and every comparison."""

from collections.abc import Callable, Sequence
from statistics import fmean, stdev

from regard.study.findings import comparisons, number, percent, questions
from regard.study.forms import NAMES
from regard.study.plan import word_of
from regard.study.summary import Summary
from regard.views.page import Html, table, tag


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
