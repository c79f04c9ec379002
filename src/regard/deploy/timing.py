"""Functions timed side by side."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SECONDS = 4.0
LEAST_ROUNDS = 5
MOST_ROUNDS = 50


@dataclass(frozen=True)
class Latency:
    """Milliseconds a call, the median; how many times faster than the first function timed, the
    median over rounds, with half the interquartile range of that as its error."""

    milliseconds: float
    speedup: float
    error: float


def interleaved(
    functions: Mapping[str, Callable[[Any], Any]], value: Any, seconds: float = SECONDS
) -> dict[str, Latency]:
    """Time f(value) of each function in rounds, until `seconds` have passed.

    A round is the same moment for all, so what else the machine does falls on all alike. Each
    call that is timed follows one of the same function that is not: a runtime's threads go on
    spinning for a while after their last call, and would slow whichever other one comes next.
    """
    rounds: list[dict[str, float]] = []
    until = time.perf_counter() + seconds
    while len(rounds) < LEAST_ROUNDS or (len(rounds) < MOST_ROUNDS and time.perf_counter() < until):
        taken = {}
        for name, function in functions.items():
            function(value)
            start = time.perf_counter()
            function(value)
            taken[name] = time.perf_counter() - start
        rounds.append(taken)
    first = next(iter(functions))
    found = {}
    for name in functions:
        ratios = [r[first] / r[name] for r in rounds]
        quarters = statistics.quantiles(ratios, n=4)
        found[name] = Latency(
            1e3 * statistics.median(r[name] for r in rounds),
            statistics.median(ratios),
            (quarters[2] - quarters[0]) / 2,
        )
    return found
