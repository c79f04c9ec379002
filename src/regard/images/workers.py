"""Worker processes that make things ahead of time, in order."""

import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

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
    context.set_forkserver_preload(["__main__", "regard.images"])
    return context
