"""What a study says about its runs: sensitivity, spread over seeds, comparisons."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

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
