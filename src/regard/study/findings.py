"""What a study says about its runs: sensitivity, spread over seeds, comparisons."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from regard.study.plan import NAMES, Grid, Settings, word_of

# Two-sided 5% points of Student's t for 1, 2, … degrees of freedom.
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip


def sensitivity(final: Mapping[float, float | None], initial: float) -> float:
    """Learning-rate sensitivity: mean over rates of min(ℓ(rate), ℓ₀), less the best of these.

    Args:
        final: the final loss ℓ at each rate of a grid even in log rate; None or NaN where the
            run diverged.
        initial: the loss ℓ₀ at initialisation, which stands for a run that ended worse.

    Where no rate improves on ℓ₀ the result is 0, which is no merit: read it beside the best loss.
    Source: Wortsman et al. 2023, arXiv 2309.14322, section 2.1.
    """
    losses = [useful(loss, initial) for loss in final.values()]
    return fmean(losses) - min(losses)


def useful(loss: float | None, initial: float) -> float:
    """min(loss, initial), with a diverged loss counted as `initial`."""
    return min(loss, initial) if loss is not None and math.isfinite(loss) else initial


def steps_to(points: Iterable[tuple[int, float]], accuracy: float) -> int | None:
    """The first step at which a measured accuracy reached `accuracy`; None if it never did."""
    return next((step for step, value in points if value >= accuracy), None)


@dataclass(frozen=True)
class Comparison:
    """The difference of two means over seeds, and how much of it chance explains.

    `margin` is the half width of the 95% interval of the difference (Welch's t, unequal
    variances); None where a side has one seed, and the spread is unknown.
    """

    mean: float
    against: float
    margin: float | None

    @property
    def difference(self) -> float:
        return self.mean - self.against

    @property
    def clear(self) -> bool:
        """Whether the difference is larger than the spread over seeds."""
        return self.margin is not None and abs(self.difference) > self.margin


def compare(values: Sequence[float], against: Sequence[float]) -> Comparison:
    """Compare two quantities measured on several seeds each."""
    margin = None
    if len(values) > 1 and len(against) > 1:
        parts = [stdev(side) ** 2 / len(side) for side in (values, against)]
        margin = t_95(welch_freedom(parts, (len(values), len(against)))) * math.sqrt(sum(parts))
    return Comparison(fmean(values), fmean(against), margin)


def welch_freedom(parts: Sequence[float], counts: Sequence[int]) -> float:
    """Degrees of freedom of a difference of means with variances `parts` (Welch 1947)."""
    if sum(parts) == 0:
        return min(counts) - 1
    return sum(parts) ** 2 / sum(p**2 / (n - 1) for p, n in zip(parts, counts, strict=True))


def t_95(freedom: float) -> float:
    """Student's t at 97.5%, degrees of freedom rounded down; beyond 20, an upper bound."""
    return T_95[min(max(int(freedom + 1e-9), 1), len(T_95)) - 1]


# From the figures of single runs to those of a form at a rate, and of a form over all rates.


Result = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One optimizer, form and rate; every list has one entry a seed.

    `loss` is min(final, initial) and `accuracy` chance where a run diverged. `largest_logit` is
    that of any layer and measurement, `lowest_entropy` the mean entropy of the layer where it is
    lowest at the last measurement, `gradient_norm` the largest measured. `steps_to` is None for a
    run that never reached the accuracy.
    """

    loss: list[float]
    accuracy: list[float]
    largest_logit: list[float]
    lowest_entropy: list[float]
    gradient_norm: list[float]
    steps_to: list[int | None]
    diverged: int


@dataclass(frozen=True)
class FormSummary:
    """One optimizer and form over all rates; lists have one entry a seed."""

    cells: dict[float, Cell]
    sensitivity: list[float]
    best_rate: float
    """The rate of the highest mean accuracy, the smallest where several are equal."""
    trained: bool
    """Whether any run ended below its loss at initialisation."""

    @property
    def best(self) -> Cell:
        return self.cells[self.best_rate]

    @property
    def highest(self) -> Cell:
        return self.cells[max(self.cells)]

    @property
    def lowest(self) -> Cell:
        return self.cells[min(self.cells)]

    @property
    def diverged(self) -> int:
        return sum(cell.diverged for cell in self.cells.values())

    @property
    def runs(self) -> int:
        return sum(len(cell.loss) for cell in self.cells.values())


@dataclass(frozen=True)
class Summary:
    """Everything a study says, before it is put into words."""

    grid: Grid
    settings: Settings
    target: float
    """The accuracy that `steps_to` counts steps to: nine tenths of the best mean, in percents."""
    forms: dict[str, dict[str, FormSummary]]
    """By optimizer and form."""

    @property
    def baseline(self) -> str:
        """The form that the others are compared with."""
        return self.grid.forms[0]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "accuracy_target": self.target,
            "forms": [
                {
                    "optimizer": optimizer,
                    "form": form,
                    "sensitivity": found.sensitivity,
                    "best_rate": found.best_rate,
                    "trained": found.trained,
                    "rates": [{"rate": r, **vars(cell)} for r, cell in found.cells.items()],
                }
                for optimizer, forms in self.forms.items()
                for form, found in forms.items()
            ],
        }


def summarise(settings: Settings, grid: Grid, results: Sequence[Result]) -> Summary:
    """Sum up the results of a finished grid."""
    groups: dict[tuple[str, str, float], list[Result]] = {}
    for result in results:
        key = (result["optimizer"], result["form"], result["rate"])
        groups.setdefault(key, []).append(result)
    best = max(fmean(accuracies(group, settings.chance)) for group in groups.values())
    target = math.floor(90 * best) / 100
    cells = {k: cell(group, settings.chance, target) for k, group in groups.items()}
    forms = {
        optimizer: {
            form: over_rates(
                {rate: cells[optimizer, form, rate] for rate in grid.rates},
                [r for r in results if (r["optimizer"], r["form"]) == (optimizer, form)],
            )
            for form in grid.forms
        }
        for optimizer in grid.optimizers
    }
    return Summary(grid, settings, target, forms)


def accuracies(group: Sequence[Result], chance: float) -> list[float]:
    """Final accuracies; a diverged run is worth a guess."""
    return [chance if r["accuracy"] is None else r["accuracy"] for r in group]


def cell(group: Sequence[Result], chance: float, target: float) -> Cell:
    """The figures of one optimizer, form and rate."""
    return Cell(
        loss=[useful(r["final_loss"], r["initial_loss"]) for r in group],
        accuracy=accuracies(group, chance),
        largest_logit=[largest(r["points"], "largest_logit") for r in group],
        lowest_entropy=[min(known(r["points"][-1]["entropy"]), default=0.0) for r in group],
        gradient_norm=[largest(r["points"], "gradient_norm") for r in group],
        steps_to=[
            steps_to(((c["step"], c["accuracy"]) for c in r["checks"]), target) for r in group
        ],
        diverged=sum(r["diverged_at"] is not None for r in group),
    )


def largest(points: Sequence[Result], name: str) -> float:
    """The largest finite value of a measurement over layers and training."""
    values = (p[name] if isinstance(p[name], list) else [p[name]] for p in points)
    return max(value for at_point in values for value in known(at_point))


def known(values: Sequence[float | None]) -> list[float]:
    """Those that are there."""
    return [value for value in values if value is not None]


def over_rates(cells: dict[float, Cell], results: Sequence[Result]) -> FormSummary:
    """One form over the rates of a grid."""
    seeds: dict[int, dict[float, float | None]] = {}
    initial: dict[int, float] = {}
    for result in results:
        seeds.setdefault(result["seed"], {})[result["rate"]] = result["final_loss"]
        initial[result["seed"]] = result["initial_loss"]
    return FormSummary(
        cells=cells,
        sensitivity=[sensitivity(losses, initial[seed]) for seed, losses in seeds.items()],
        best_rate=max(cells, key=lambda rate: fmean(cells[rate].accuracy)),
        trained=any(
            useful(r["final_loss"], r["initial_loss"]) < r["initial_loss"] for r in results
        ),
    )


# What the figures of a study say, in sentences that are never stronger than the figures.
#
# A difference is stated as one only where it is larger than the spread over seeds (`compare`).


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
