"""What the figures of a study say, in sentences that are never stronger than the figures.

A difference is stated as one only where it is larger than the spread over seeds (`compare`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from regard.study.forms import NAMES
from regard.study.measures import Comparison, compare
from regard.study.plan import word_of
from regard.study.summary import FormSummary, Summary

OPTIMIZER_NAMES = {"adamw": "AdamW", "muon": "Muon"}


@dataclass(frozen=True)
class Question:
    """One figure by which forms are compared, and how it is put into words.

    `setting` opens the sentence; `quantity` is what is high or low; `values` are those over seeds.
    """

    name: str
    setting: str
    quantity: str
    values: Callable[[FormSummary], Sequence[float]]
    show: Callable[[float], str]
    high_is_good: bool


def number(value: float) -> str:
    """Three significant digits; thousands whole, with commas; what only rounding made is 0."""
    if abs(value) < 1e-9:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def questions(summary: Summary) -> list[Question]:
    """What is asked of every form."""
    low, high = (word_of(of(summary.grid.rates)) for of in (min, max))
    asked = [
        Question(
            "sensitivity", f"Over learning rates from {low} to {high}",
            "the sensitivity to the rate", lambda f: f.sensitivity, number, False,
        ),
        Question(
            "at the highest rate", f"At the highest rate, {high},",
            "held-out accuracy", lambda f: f.highest.accuracy, percent, True,
        ),
        Question(
            "at its best rate", "With each form at its own best rate",
            "held-out accuracy", lambda f: f.best.accuracy, percent, True,
        ),
        Question(
            "at the lowest rate", f"At the lowest rate, {low},",
            "the training loss", lambda f: f.lowest.loss, number, False,
        ),
    ]  # fmt: skip
    return asked[:1] + asked[2:3] if low == high else asked


def comparisons(summary: Summary, optimizer: str, question: Question) -> dict[str, Comparison]:
    """Every other form against the baseline."""
    forms = summary.forms[optimizer]
    base = question.values(forms[summary.baseline])
    return {
        form: compare(question.values(found), base)
        for form, found in forms.items()
        if form != summary.baseline
    }


def sentences(summary: Summary, optimizer: str) -> list[str]:
    """What the comparisons say, one sentence a question."""
    return [answer(summary, question, comparisons(summary, optimizer, question))
            for question in questions(summary)]  # fmt: skip


def answer(summary: Summary, question: Question, found: dict[str, Comparison]) -> str:
    """One question answered for all forms together."""
    base = NAMES[summary.baseline]
    if not found:
        return f"{question.setting} only {base} was studied: there is nothing to compare."
    shown = question.show
    against = f"with {base} ({shown(next(iter(found.values())).against)})"
    if all(c.margin is None for c in found.values()):
        listed = listing([f"{shown(c.mean)} with {NAMES[f]}" for f, c in found.items()])
        return (
            f"{question.setting} {question.quantity} is {listed}, and {against}; with one "
            "seed the spread is unknown, so this says nothing of a difference."
        )
    parts = []
    for word, sign in (("higher", 1), ("lower", -1)):
        forms = {f: c for f, c in found.items() if c.clear and c.difference * sign > 0}
        if forms:
            parts.append(f"{word} with {valued(forms, shown)}")
    same = {f: c for f, c in found.items() if not c.clear}
    text = f"{question.setting} "
    if parts:
        text += f"{question.quantity} is {' and '.join(parts)} than {against}"
        text += ", by more than the spread over seeds"
        if same:
            text += f"; with {valued(same, shown)} the difference is within that spread"
        return text + "."
    return (
        f"{text}no form differs in {question.quantity} from {base} by more than the spread over "
        f"seeds: {valued(found, shown)}, {against}."
    )


def valued(found: dict[str, Comparison], show: Callable[[float], str]) -> str:
    """Forms with their means."""
    return listing([f"{NAMES[form]} ({show(c.mean)})" for form, c in found.items()])


def listing(parts: Sequence[str]) -> str:
    """a, b and c."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def headline(summary: Summary, optimizer: str) -> str:
    """The answer in one sentence, from the norms alone (the cap is a control)."""
    sense, *_ = asked = questions(summary)
    best = next(q for q in asked if q.name == "at its best rate")
    norms = [f for f in summary.grid.forms if f not in (summary.baseline, "cap")]
    if summary.baseline != "none" or not norms:
        return (
            "The forms studied do not include both QK norm and none, so this cannot say whether "
            "it helps."
        )
    if summary.grid.seeds == 1:
        return "One seed cannot say whether QK norm helps: the spread over seeds is unknown."
    widens = verdict(comparisons(summary, optimizer, sense), norms, high_is_good=False)
    tuned = verdict(comparisons(summary, optimizer, best), norms, high_is_good=True)
    range_words = {
        "better": "every form of QK norm makes the learning rate matter less here",
        "worse": "every form of QK norm makes the learning rate matter more here",
        "same": "this study shows no effect of QK norm on how much the learning rate matters "
        "that is larger than the spread",
        "mixed": "some forms of QK norm change how much the learning rate matters, others not",
    }
    tuned_words = {
        "better": "it is more accurate at its best rate too",
        "worse": "at its best rate it is less accurate",
        "same": "at the best rate of each it shows no difference in accuracy larger than the "
        "spread",
        "mixed": "at the best rate of each the forms differ among themselves",
    }
    return f"With {OPTIMIZER_NAMES[optimizer]}, {range_words[widens]}; {tuned_words[tuned]}."


def verdict(found: dict[str, Comparison], forms: Sequence[str], *, high_is_good: bool) -> str:
    """ "better", "worse" or "same" where all forms are so, else "mixed"."""
    kinds = set()
    for form in forms:
        c = found[form]
        good = (c.difference > 0) == high_is_good
        kinds.add(("better" if good else "worse") if c.clear else "same")
    return kinds.pop() if len(kinds) == 1 else "mixed"


def logits_sentence(summary: Summary, optimizer: str) -> str:
    """How far attention logits grew at the highest rate."""
    forms = summary.forms[optimizer]
    listed = listing(
        [f"{number(fmean(f.highest.largest_logit))} with {NAMES[n]}" for n, f in forms.items()]
    )
    high = word_of(max(summary.grid.rates))
    return f"The largest attention logit at the rate {high} was on average {listed}."


def control_sentence(summary: Summary, optimizer: str) -> str | None:
    """What the soft cap, which only bounds the logits, tells about why QK norm acts."""
    forms = summary.forms[optimizer]
    norms = [f for f in summary.grid.forms if f not in ("none", "cap")]
    if not {"none", "cap"} <= set(forms) or not norms or summary.grid.seeds == 1:
        return None
    cap = forms["cap"].sensitivity
    gain = compare(cap, forms["none"].sensitivity)
    left = {form: compare(forms[form].sensitivity, cap) for form in norms}
    better = [f for f in norms if left[f].clear and left[f].difference < 0]
    if not gain.clear:
        first = "Capping the logits alone changes the sensitivity by no more than the spread"
    elif gain.difference < 0:
        first = "Capping the logits alone lowers the sensitivity"
    else:
        first = "Capping the logits alone raises the sensitivity"
    if len(better) == len(norms):
        return (
            f"{first}, and every norm lowers it further than the cap: there is more to QK norm "
            "here than bounded logits."
        )
    if not better:
        return f"{first}, and no norm is below the cap by more than the spread."
    return f"{first}; below the cap by more than the spread: {listing([NAMES[f] for f in better])}."


def divergence_sentence(summary: Summary, optimizer: str) -> str:
    """How many runs broke down."""
    forms = summary.forms[optimizer]
    broken = {name: f for name, f in forms.items() if f.diverged}
    total = sum(f.runs for f in forms.values())
    if not broken:
        return f"None of the {total} runs diverged."
    parts = [f"{f.diverged} of {f.runs} with {NAMES[name]}" for name, f in broken.items()]
    return f"Diverged, to a loss that is not finite: {listing(parts)}."


def never_trained(summary: Summary, optimizer: str) -> str | None:
    """A warning about a sensitivity that is low because nothing was learned."""
    stuck = [NAMES[name] for name, f in summary.forms[optimizer].items() if not f.trained]
    if not stuck:
        return None
    return (
        f"No rate trained a model with {listing(stuck)} at all: its sensitivity of 0 is no merit."
    )


def statements(summary: Summary, optimizer: str) -> list[str]:
    """What the page says at its head: the answer, then what it rests on."""
    parts = [
        headline(summary, optimizer),
        *sentences(summary, optimizer),
        logits_sentence(summary, optimizer),
        control_sentence(summary, optimizer),
        divergence_sentence(summary, optimizer),
        never_trained(summary, optimizer),
    ]
    return [part for part in parts if part]


def conclusion(summary: Summary, optimizer: str) -> str:
    """The same as plain text: the answer, then a line for each thing it rests on."""
    return "\n  - ".join(statements(summary, optimizer))
