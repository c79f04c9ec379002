"""The learning rate as a function of the step."""

import math


def rate(step: int, steps: int, warmup: float) -> float:
    """The factor on the peak rate at `step` of `steps`, counted from 0.

    A line from 1/w to 1 over the first w = ⌈warmup · steps⌉ steps, then half a cosine:
    ½ (1 + cos(π (step - w) / (steps - w))), which would reach 0 one step after the last.
    """
    rising = math.ceil(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))
