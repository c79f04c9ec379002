"""How much of a training step is training: the real loop beside a bare step on ready tensors.

    python -m benchmarks.training                 # run, store, print the table
    python -m benchmarks.training --table         # print what is stored

The loop is that of `regard train`: batches read from decoded pictures in memory and augmented as
the preset says, gradients clipped, the EMA where asked, metrics logged, checkpoints written. The
bare step is forward, cross-entropy, backward and the same optimizer on tensors that are there
already. Both are taken in turn, a step of one after a step of the other, so that a busy moment
hits them alike; the speed is the median of the ratios of neighbours. Beside it stands what happens
outside a step: making a batch, a checkpoint (the extra time of a step that starts writing one),
and measuring the attention's health.
"""

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.common import milliseconds, once, store, stored, table
from regard.training.config import TrainConfig
from regard.training.distributed import Processes
from regard.training.loggers import Reporter
from regard.training.optimizers import build_optimizers
from regard.training.run_folder import RunFolder
from regard.training.setup import new_job
from regard.training.step import Job
from regard.training.trainer import run

MODELS = ("simple-vit-ti/4", "pixel-resnet-s")
CLASSES, SIDE, BATCH = 10, 32, 128
WARM = 1  # steps that are not counted
EPOCH = 50_000 // BATCH  # steps between evaluations on a data set of CIFAR-10's size


def pictures(root: Path, count: int) -> Path:
    """A folder of class folders of noisy pictures; what they show does not change the time."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(count):
        place = root / f"class{i % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{i}.png")
    return root


class Turns:
    """Stands before a run's log: after each step of the loop, one bare step; both are timed."""

    def __init__(self, job: Job) -> None:
        self.log = job.log
        self.loop: list[float] = []
        self.bare: list[float] = []
        self._bare_step = bare_step(job)
        self._start = time.perf_counter()

    def step(self, *arguments: Any) -> None:
        self.log.step(*arguments)
        self.loop.append(time.perf_counter() - self._start)
        self.bare.append(once(self._bare_step, "cpu"))
        self._start = time.perf_counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.log, name)


def bare_step(job: Job) -> Any:
    """Forward, backward and update of an equal model on tensors that are ready."""
    import regard

    recipe = job.config.recipe
    torch.manual_seed(recipe.seed)
    model = regard.create(**job.config.model).train()
    optimizers = build_optimizers(model, recipe.optimizer, recipe.lr, recipe.weight_decay)
    batch = job.batches.at(0)

    def step() -> None:
        F.cross_entropy(model(batch.images), batch.targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def measure(name: str, options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """The row of one model."""
    config = TrainConfig(
        str(options.data), out=place / name.replace("/", "-"), model=name, preset="small",
        batch_size=BATCH, precision="fp32", steps=options.steps + WARM, workers=options.workers,
        save_every=options.save_every, eval_every=1e6, optimizer=options.optimizer,
    )  # fmt: skip
    processes, reporter = Processes("cpu", "auto"), Reporter(say=lambda line: None)
    folder = RunFolder.fresh(config.out, name)
    with folder.lock():
        job = new_job(config, folder, processes, reporter)
        turns = Turns(job)
        saves: list[int] = []
        real = job.checkpoints.save

        def save(state: Any) -> None:
            saves.append(state.progress.step)
            real(state)

        job.checkpoints.save = save  # type: ignore[method-assign]
        run(dataclasses.replace(job, log=turns))  # type: ignore[arg-type]
        job.log.close()
        writing = once(lambda: (real(job.state), job.checkpoints.wait()), "cpu")
    # the step after the one that is saved is that in whose time the state is copied
    saved = [turns.loop[s] for s in saves if WARM <= s < len(turns.loop)]
    loop, bare = (median(times[WARM:]) for times in (turns.loop, turns.bare))
    ratios = (b / a for a, b in zip(turns.loop[WARM:], turns.bare[WARM:], strict=True))
    health = median(once(lambda: job.health.measure(job.state.model), "cpu") for _ in range(3))
    return {
        "bare": bare,
        "loop": loop,
        "speed": median(ratios),
        "batch": median(once(lambda s=s: job.batches.at(s), "cpu") for s in range(10)),
        "checkpoint": max(0.0, median(saved) - loop) if saved else None,
        "writing": writing,
        "health": health,
        "steps": len(turns.loop) - WARM,
        "optimizer": job.config.recipe.optimizer,
        "workers": options.workers,
    }


def report(results: dict[str, Any]) -> str:
    """The stored rows as a table."""
    body = []
    for name, row in results["rows"].items():
        body.append(
            [
                name,
                f"{row['steps']}",
                milliseconds(row["bare"]),
                milliseconds(row["loop"]),
                f"{row['speed']:.1%}",
                milliseconds(row["batch"]),
                milliseconds(row["checkpoint"]),
                f"{row['health'] / (EPOCH * row['loop'] + row['health']):.3%}",
            ]
        )
    header = [
        "model, optimizer, workers", "steps", "bare step (ms)", "step of the loop (ms)",
        "speed of the loop", "making a batch (ms)", "a checkpoint adds (ms)",
        "attention health, of an epoch",
    ]  # fmt: skip
    return f"{results['machine']}.\n\n{table(header, body)}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--models", nargs="+", default=list(MODELS))
    options.add_argument("--steps", type=int, default=12, help="counted steps of each model")
    options.add_argument("--workers", type=int, default=0)
    options.add_argument("--optimizer", default=None, help="the preset's unless given")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--images", type=int, default=2000)
    options.add_argument("--save-every", type=float, default=0.8, help="minutes to a checkpoint")
    options.add_argument("--table", action="store_true", help="print what is stored, run nothing")
    given = options.parse_args()
    if not given.table:
        torch.set_num_threads(given.threads)
        with tempfile.TemporaryDirectory() as place:
            given.data = pictures(Path(place) / "pictures", given.images)
            for name in given.models:
                row = measure(name, given, Path(place))
                key = f"{name}, {row['optimizer']}, {given.workers}"
                store("training", "cpu", {key: row})
                print(key, {k: v for k, v in row.items() if isinstance(v, float)}, flush=True)
    print(report(stored("training", "cpu")))


if __name__ == "__main__":
    main()
