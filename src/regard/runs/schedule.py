"""The learning rate as a function of the step."""

import math


def rate(step: int, steps: int, warmup: float, schedule: str = "cosine") -> float:
    """The factor on the peak rate at `step` of `steps`, counted from 0.

    A line from 1/w to 1 over the first w = ⌈warmup · steps⌉ steps; then, with
    t = (step - w) / (steps - w), "cosine": ½ (1 + cos πt), or "linear": 1 - t. Both would reach 0
    one step after the last.
    """
    rising = math.ceil(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    t = (step - rising) / (steps - rising)
    return 1 - t if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * t))
