"""Functions timed side by side."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.dataset import Split, readable
from regard.data.preprocess import Preprocess
from regard.errors import InputError, RegardError
from regard.export.formats import FileFacts, ModuleRunner, Runner

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


# An exported file beside the model it came from, on real images.


BATCH = 32
OTHER_BATCH = 5
# The largest difference of an output: fp32 of what the file gives, half of probabilities.
TOLERANCE = {"fp32": 1e-4, "half": 1e-2, "int8": math.inf}


class NotEqual(RegardError):
    """A file does not do what its model does; it is not kept."""


@dataclass
class Agreement:
    """How far a file is from its model, over `images` real images."""

    difference: float = 0.0
    """Largest absolute difference of an output: of logits, or of probabilities."""
    probability_difference: float = 0.0
    same: int = 0
    """Images with the same most probable class."""
    right: int = 0
    """Images whose most probable class is their label."""
    images: int = 0
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of the input at which the outputs were compared."""

    def compare(self, outputs: Tensor, wanted: Tensor, takes: str) -> None:
        """Take in outputs (b, k) beside those of the model."""
        if outputs.shape != wanted.shape or not torch.isfinite(outputs).all():
            raise NotEqual(
                f"the file gave outputs of shape {tuple(outputs.shape)}"
                f"{'' if torch.isfinite(outputs).all() else ' that are not finite'} where the "
                f"model gives {tuple(wanted.shape)}"
            )
        gap = (outputs - wanted).abs().max().item()
        self.difference = max(self.difference, gap)
        if takes == "tensor":
            gap = (outputs.softmax(1) - wanted.softmax(1)).abs().max().item()
        self.probability_difference = max(self.probability_difference, gap)

    def count(self, outputs: Tensor, wanted: Tensor, labels: Tensor) -> None:
        """Count classes that are the same, and that are right."""
        best = outputs.argmax(1)
        self.same += int((best == wanted.argmax(1)).sum())
        self.right += int((best == labels).sum())
        self.images += len(labels)

    @property
    def accuracy(self) -> float:
        return self.right / self.images

    def figures(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "images": self.images,
            "largest_difference": self.difference,
            "largest_probability_difference": self.probability_difference,
            "same_class": self.same / self.images,
            "accuracy": self.accuracy,
            "input_shapes": [list(shape) for shape in self.shapes],
        }


class Reference:
    """The model with its own preprocessing, and what a file is fed to be compared with it."""

    def __init__(self, model: nn.Module, preprocess: Preprocess, takes: str) -> None:
        self.runner = ModuleRunner(model.eval(), torch.device("cpu"))
        self.preprocess = preprocess
        self.takes = takes

    def input(self, pictures: Sequence[Tensor], preprocess: Preprocess | None = None) -> Tensor:
        """What a file takes for these uint8 pictures (c, H, W), here of equal size if raw."""
        if self.takes == "image":
            return torch.stack(tuple(pictures)).permute(0, 2, 3, 1).contiguous()
        return torch.stack([(preprocess or self.preprocess)(p) for p in pictures])

    def output(self, pictures: Sequence[Tensor], preprocess: Preprocess | None = None) -> Tensor:
        """What the model gives for them."""
        inputs = torch.stack([(preprocess or self.preprocess)(p) for p in pictures])
        logits = self.runner(inputs)
        return logits if self.takes == "tensor" else logits.softmax(dim=1)

    def __call__(self, images: Tensor) -> Tensor:
        """The model fed as a file is, for timing."""
        if self.takes == "tensor":
            return self.runner(images)
        return self.output(list(images.permute(0, 3, 1, 2)))


def prove(
    reference: Reference, runners: Mapping[str, Runner], facts: FileFacts, split: Split, most: int
) -> dict[str, Agreement]:
    """Each runner beside the reference on `most` images of the split, spread evenly over it.

    The images go through in batches; the first few also at another batch size and, where the
    input's size is dynamic, at another size. The reference itself is measured as "eager".
    """
    found = {name: Agreement() for name in ("eager", *runners)}
    first: list[Tensor] = []
    for pictures, labels in batches(split, most):
        first = first or pictures[:OTHER_BATCH]
        wanted = reference.output(pictures)
        found["eager"].count(wanted, wanted, labels)
        for name, runner in runners.items():
            outputs = outputs_of(reference, runner, pictures, found[name])
            found[name].compare(outputs, wanted, reference.takes)
            found[name].count(outputs, wanted, labels)
    if not first:
        raise InputError("none of the validation images could be read; restore them, or --data")
    for name, runner in runners.items():
        prove_shapes(reference, runner, facts, first, found[name])
    return found


def batches(split: Split, most: int) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Pictures as they are, with labels, spread evenly over the split; unreadable ones left out."""
    positions = np.unique(np.linspace(0, len(split) - 1, min(most, len(split))).round().astype(int))
    for start in range(0, len(positions), BATCH):
        pictures, labels = [], []
        for position, picture in readable(split, positions[start : start + BATCH].tolist()):
            pictures.append(picture)
            labels.append(int(split.labels[position]))
        if pictures:
            yield pictures, torch.tensor(labels)


def outputs_of(
    reference: Reference, runner: Runner, pictures: list[Tensor], found: Agreement
) -> Tensor:
    """The runner's outputs for a batch; pictures as they are go one by one."""
    groups = [[p] for p in pictures] if reference.takes == "image" else [pictures]
    outputs = []
    for group in groups:
        inputs = reference.input(group)
        note(found, inputs)
        outputs.append(runner(inputs))
    return torch.cat(outputs)


def prove_shapes(
    reference: Reference, runner: Runner, facts: FileFacts, pictures: list[Tensor], found: Agreement
) -> None:
    """Compare at a batch of one and of several, and at other sizes where they are dynamic."""
    h, w = reference.preprocess.size
    variants: list[tuple[list[Tensor], Preprocess | None]] = []
    if facts.takes == "image":
        height, width = (min(p.shape[axis] for p in pictures) for axis in (1, 2))
        cut = [p[:, :height, :width] for p in pictures]
        taller = [torch.cat([p, p[:, :1, :]], dim=1) for p in cut]
        variants = [(cut, None), (taller, None), ([p[:, :, : width // 2 + 1] for p in cut], None)]
    else:
        variants = [(pictures[:1], None), (pictures, None)]
        if "height" in facts.dynamic:
            rows, columns = facts.multiple
            for size in ((h + rows, w + 2 * columns), (h + 2 * rows, w)):
                other = dataclasses.replace(reference.preprocess, size=size)
                variants.append((pictures, other))
    for group, preprocess in variants:
        inputs = reference.input(group, preprocess)
        note(found, inputs)
        found.compare(runner(inputs), reference.output(group, preprocess), facts.takes)


def note(found: Agreement, inputs: Tensor) -> None:
    """Remember a shape that was compared; of many, the first few."""
    shape = tuple(inputs.shape)
    if shape not in found.shapes and (len(found.shapes) < 8 or len(shape) == 0):
        found.shapes.append(shape)


def check(found: Agreement, eager: Agreement, precision: str, max_drop: float) -> None:
    """Refuse a file that is too far from its model, saying how far."""
    tolerance = TOLERANCE[precision]
    if precision == "int8":
        drop = 100 * (eager.accuracy - found.accuracy)
        if drop > max_drop:
            raise NotEqual(
                f"in int8 the accuracy falls by {drop:.2f} points, from {eager.accuracy:.2%} to "
                f"{found.accuracy:.2%} on {found.images:,} images, and --max-drop allows "
                f"{max_drop:g}; nothing was kept"
            )
        return
    what = "output" if precision == "fp32" else "probability"
    gap = found.difference if precision == "fp32" else found.probability_difference
    if not gap <= tolerance:
        raise NotEqual(
            f"the file's largest {what} difference from the model is {gap:.2g}, and "
            f"{tolerance:g} is allowed; nothing was kept"
        )
    if precision == "fp32" and found.same != found.images:
        raise NotEqual(
            f"the file names another class than the model for {found.images - found.same:,} of "
            f"{found.images:,} images; nothing was kept"
        )
