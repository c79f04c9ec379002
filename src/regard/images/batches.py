"""Batches: what the training step consumes and what evaluation walks through.

Training step s of a batch of B takes positions [sB, (s + 1)B) of the concatenated epoch
permutations, so the batch is a pure function of (seed, s): any number of workers, any number of
processes and any first step give the same bits. The microbatch is the atom: processes take whole
microbatches of a step, and Mixup and CutMix look no further than one.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from regard.errors import InputError
from regard.images.augment import Augment, erase_boxes, flip_and_shift, load_picture, mix
from regard.images.batch import Batch, collate, join
from regard.images.data import Split
from regard.images.preprocess import Preprocess
from regard.images.workers import deliver


class TrainBatches:
    """The training batches of this process.

    `at(step)` makes one; `start(step)` iterates from a step on, without end, `workers` processes
    working ahead. `batch_size` counts all processes; it must be a whole number of microbatches
    for each of the `world` processes, of which this is number `rank`: rank r takes the r-th run
    of the step's microbatches. `microbatch` is the batch size of one process unless given.
    """

    def __init__(
        self,
        split: Split,
        preprocess: Preprocess,
        augment: Augment | None = None,
        *,
        batch_size: int,
        microbatch: int | None = None,
        seed: int = 0,
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        check_place(rank, world, workers)
        if len(split) == 0:
            raise InputError("the training split is empty; give at least one picture")
        if microbatch is None:
            microbatch = max(1, batch_size // world)
        if batch_size < 1 or microbatch < 1 or batch_size % (microbatch * world):
            raise InputError(
                f"a batch of {batch_size} is not a whole number of microbatches of {microbatch} "
                f"for each of {world} processes; choose batch_size a multiple of "
                f"{microbatch * world}"
            )
        self.split = split
        self.preprocess = preprocess
        self.augment = augment or Augment()
        self.batch_size = batch_size
        self.microbatch = microbatch
        self.seed = seed
        self.workers = workers
        self.rank = rank
        self.world = world
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": (-1, np.empty(0, np.int64))}

    @property
    def steps_per_epoch(self) -> float:
        """len(split) / batch_size; a step may end one epoch and begin the next."""
        return len(self.split) / self.batch_size

    @property
    def microbatches(self) -> int:
        """How many microbatches of a step are this process's."""
        return self.batch_size // (self.microbatch * self.world)

    def at(self, step: int) -> Batch:
        """This process's part of the batch of one step."""
        if step < 0:
            raise InputError(f"step is {step}; steps count from 0")
        first = self.rank * self.microbatches
        return join([self.part(step, first + m) for m in range(self.microbatches)])

    def start(self, step: int = 0) -> Iterator[Batch]:
        """Batches from `step` on, without end; closing the iterator ends the workers."""
        if step < 0:
            raise InputError(f"step is {step}; steps count from 0")
        first, count = self.rank * self.microbatches, self.microbatches

        def tasks() -> Iterator[tuple[int, int]]:
            now = step
            while True:
                yield from ((now, first + m) for m in range(count))
                now += 1

        parts: list[Batch] = []
        for part in deliver(self.part, tasks(), self.workers):
            parts.append(part)
            if len(parts) == count:
                yield join(parts)
                parts = []

    def part(self, step: int, microbatch: int) -> Batch:
        """One microbatch of a step, numbered over all processes."""
        begin = step * self.batch_size + microbatch * self.microbatch
        positions = np.arange(begin, begin + self.microbatch)
        epochs, places = positions // len(self.split), positions % len(self.split)
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            indices[of_epoch] = self._permutation(int(epoch))[places[of_epoch]]

        def prepare(picture: Tensor, j: int) -> Tensor:
            epoch, index = int(epochs[j]), int(indices[j])
            return load_picture(picture, self.preprocess, self.augment, self.seed, epoch, index)

        augment = self.augment
        one_by_one = bool(augment.crop_scale or augment.randaugment)
        batch = collate(self.split, self.preprocess, indices, prepare if one_by_one else None)
        images = flip_and_shift(batch.images, augment, self.seed, epochs, indices)
        images = erase_boxes(images, augment.erase, self.seed, epochs, indices)
        images, targets = mix(
            images, batch.targets, batch.weights, augment, self.seed, step, microbatch
        )
        return replace(batch, images=images, targets=targets)

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            self._order = (epoch, self.split.order(self.seed, epoch))
        return self._order[1]


class _EvalParts:
    """Makes the evaluation batch that begins at a position."""

    def __init__(self, split: Split, preprocess: Preprocess, batch_size: int) -> None:
        self.split = split
        self.preprocess = preprocess
        self.batch_size = batch_size

    def __call__(self, begin: int) -> Batch:
        indices = np.arange(begin, min(begin + self.batch_size, len(self.split)))
        return collate(self.split, self.preprocess, indices)


def eval_batches(
    split: Split,
    preprocess: Preprocess,
    *,
    batch_size: int,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Batch]:
    """Every picture exactly once over all processes, in order, the last batch possibly smaller.

    Batch j goes to process j mod `world`, so the batches themselves do not depend on it. Some
    processes may get one batch fewer: do not synchronise between batches.
    """
    check_place(rank, world, workers)
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}; give at least 1")
    make = _EvalParts(split, preprocess, batch_size)
    begins = range(rank * batch_size, len(split), world * batch_size)
    return deliver(make, ((begin,) for begin in begins), workers)


def check_place(rank: int, world: int, workers: int) -> None:
    """Refuse a process number outside 0 .. world - 1, and negative workers."""
    if not 0 <= rank < world:
        raise InputError(f"rank is {rank} of world {world}; ranks count from 0 to world - 1")
    if workers < 0:
        raise InputError(f"workers is {workers}; give 0 for none, or a number of processes")
