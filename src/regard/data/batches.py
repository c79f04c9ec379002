"""Worker processes that make things ahead of time, in order."""

import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from regard.data.augment import Augment, erase_boxes, flip_and_shift, load_picture, mix
from regard.data.dataset import Split
from regard.data.decode import UnreadableImage
from regard.data.preprocess import Preprocess
from regard.errors import InputError

_AHEAD = 2  # tasks that each worker has in hand


class _Tasks(Dataset[Any]):
    """A map from a task to what is made of it, as DataLoader wants it."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __getitem__(self, task: tuple[Any, ...]) -> Any:
        return self.make(*task)


class _Order:
    """A sampler that hands out tasks as they are."""

    def __init__(self, tasks: Iterator[tuple[Any, ...]]) -> None:
        self.tasks = tasks

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self.tasks


def deliver(
    make: Callable[..., Any], tasks: Iterator[tuple[Any, ...]], workers: int
) -> Iterator[Any]:
    """make(*task) of each task, in the order of the tasks, made by `workers` processes.

    With 0 workers it is made here. `make` is pickled for the workers, and a script needs its
    `if __name__ == "__main__"`. What is made depends on the task alone, so the number of workers
    changes nothing but speed.
    """
    if workers < 0:
        raise InputError(f"workers is {workers}; give 0 or more")
    if workers == 0:
        return itertools.starmap(make, tasks)
    return _from_processes(make, tasks, workers)


def _from_processes(
    make: Callable[..., Any], tasks: Iterator[tuple[Any, ...]], workers: int
) -> Iterator[Any]:
    yield from DataLoader(
        _Tasks(make),
        batch_size=None,
        sampler=_Order(tasks),  # type: ignore[arg-type]
        num_workers=workers,
        prefetch_factor=_AHEAD,
        collate_fn=_as_made,
        worker_init_fn=_end_with_parent,
        multiprocessing_context=_context(),
        # DataLoader draws its workers' seeds from here; the global generator stays untouched.
        generator=torch.Generator(),
    )


def _end_with_parent(worker: int) -> None:
    """End this worker when the process it works for is gone, however that was killed.

    DataLoader's own watch is on the process that forked the worker: the server, which lives as
    long as its workers do.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_leave_after, args=(parent,), daemon=True).start()


def _leave_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _as_made(made: Any) -> Any:
    return made


def _context() -> BaseContext:
    """Processes forked from a server that has imported us once, without our threads or GPU state.

    Where there is no fork they are spawned, and each imports anew.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "regard.data"])
    return context


# A batch, and how pictures become one.


@dataclass(frozen=True)
class Batch:
    """Images (b, c, h, w) float32, normalised, and what they are.

    `targets` (b, k) float32 class probabilities, one-hot or mixed; `labels` (b,) int64; `weights`
    (b,) float32, 0 where the file could not be read (the image is zeros then) and 1 elsewhere: a
    mean over the batch divides by their sum, which may be 0. `indices` (b,) int64 positions in
    the split. `unreadable` holds (index, name, reason) of each picture of weight 0.
    """

    images: Tensor
    targets: Tensor
    labels: Tensor
    weights: Tensor
    indices: Tensor
    unreadable: tuple[tuple[int, str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same batch on a device; `indices` stay where they are."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=non_blocking)
            for name in ("images", "targets", "labels", "weights")
        }
        return replace(self, **moved)

    def split(self, size: int) -> list["Batch"]:
        """Microbatches of `size`, as views; the last may be smaller."""
        parts = []
        for start in range(0, len(self), size):
            cut = slice(start, start + size)
            held = set(self.indices[cut].tolist())
            bad = tuple(entry for entry in self.unreadable if entry[0] in held)
            parts.append(
                Batch(
                    self.images[cut],
                    self.targets[cut],
                    self.labels[cut],
                    self.weights[cut],
                    self.indices[cut],
                    bad,
                )
            )
        return parts


def join(parts: list[Batch]) -> Batch:
    """One batch of several, in order."""
    if len(parts) == 1:
        return parts[0]
    return Batch(
        torch.cat([part.images for part in parts]),
        torch.cat([part.targets for part in parts]),
        torch.cat([part.labels for part in parts]),
        torch.cat([part.weights for part in parts]),
        torch.cat([part.indices for part in parts]),
        tuple(entry for part in parts for entry in part.unreadable),
    )


def collate(
    split: Split,
    preprocess: Preprocess,
    indices: np.ndarray,
    prepare: Callable[[Tensor, int], Tensor] | None = None,
) -> Batch:
    """Read, prepare and normalise the pictures at `indices`.

    `prepare(picture, j)` brings the j-th of them to the input's size, in 0..255; unless given,
    they are fitted as evaluation does, which at that size already changes nothing.
    """
    if prepare is None:
        whole = split.together(indices)
        if whole is not None and whole.shape[1:] == (preprocess.channels, *preprocess.size):
            return _labelled(split, indices, preprocess.normalise(whole))
    pictures, weights, unreadable = [], [], []
    for j, index in enumerate(indices.tolist()):
        try:
            picture = split.read(index)
        except UnreadableImage as error:
            unreadable.append((index, error.name, error.reason))
            pictures.append(torch.zeros(preprocess.channels, *preprocess.size))
            weights.append(0.0)
        else:
            fitted = preprocess.fitted(picture) if prepare is None else prepare(picture, j)
            pictures.append(fitted)
            weights.append(1.0)
    kept = torch.tensor(weights)
    images = preprocess.normalise(torch.stack(pictures))
    if unreadable:
        images = images * kept.view(-1, 1, 1, 1)
    batch = _labelled(split, indices, images)
    return replace(batch, weights=kept, unreadable=tuple(unreadable))


def _labelled(split: Split, indices: np.ndarray, images: Tensor) -> Batch:
    labels = torch.from_numpy(split.labels[indices])
    targets = F.one_hot(labels, split.num_classes).to(torch.float32)
    return Batch(images, targets, labels, torch.ones(len(labels)), torch.from_numpy(indices))


# Batches: what the training step consumes and what evaluation walks through.
#
# Training step s of a batch of B takes positions [sB, (s + 1)B) of the concatenated epoch
# permutations, so the batch is a pure function of (seed, s): any number of workers, any number of
# processes and any first step give the same bits. The microbatch is the atom: processes take whole
# microbatches of a step, and Mixup and CutMix look no further than one.


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
