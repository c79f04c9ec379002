"""From the figures of single runs to those of a form at a rate, and of a form over all rates."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from regard.study.measures import sensitivity, steps_to, useful
from regard.study.plan import Grid, Settings

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
