"""One training run, from a request to a finished folder."""

import contextlib
import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.files import write_json
from regard.images import (
    Data,
    Preprocess,
    TrainBatches,
    open_data,
    pixel_statistics,
    remember,
)
from regard.models.create import create
from regard.runs.checkpoint import Checkpoints, load_checkpoint
from regard.runs.config import RunConfig, Segment, TrainConfig
from regard.runs.environment import environment
from regard.runs.evaluate import held_out, predict_split, write_evaluation
from regard.runs.folder import RunFolder
from regard.runs.inherit import start_from, what_it_keeps
from regard.runs.log import MetricsLog
from regard.runs.loop import Job, run
from regard.runs.metrics import Evaluation
from regard.runs.optimizer import build_optimizers
from regard.runs.prescan import without_quarantined
from regard.runs.processes import Processes
from regard.runs.reference import reference_images
from regard.runs.reporter import Reporter
from regard.runs.resolve import new_recipe, resumed_recipe
from regard.runs.state import TrainState
from regard.runs.timing import choose_precision, plan_steps, with_recipe


@dataclass(frozen=True, eq=False)
class TrainResult:
    """A finished run: its folder, and how well it did on the images held out."""

    folder: Path
    evaluation: Evaluation
    minutes: float
    """Time spent in the loop, over all segments."""

    @property
    def accuracy(self) -> float:
        """Share of the held-out images that are classified right."""
        return self.evaluation.accuracy

    @property
    def held_out(self) -> int:
        """How many images that is a share of."""
        return len(self.evaluation.labels)


def train(config: TrainConfig, say: Callable[[str], None] | None = None) -> TrainResult:
    """Train, or go on training, and write the run folder.

    `say` gets each line meant for people; without it they are printed, with a progress bar where
    there is a terminal. Under torchrun every process calls this together.
    """
    if config.resume and config.out is None:
        raise InputError("--resume needs --out, the folder of the run to go on with")
    folder = RunFolder.open(config.out) if config.resume and config.out else None
    stored = folder.config() if folder else None
    settings = stored.recipe if stored else None
    processes = Processes(
        config.device or (settings.device if settings else "auto"),
        config.strategy or (settings.strategy if settings else "auto"),
    )
    reporter = Reporter(quiet=not processes.main, say=say)
    if folder is None:
        fresh = RunFolder.fresh(config.out, run_name(config.data)).path if processes.main else None
        folder = RunFolder(processes.of_main(fresh))
    with contextlib.ExitStack() as stack:
        if processes.main:
            stack.enter_context(folder.lock())
            if not config.resume and folder.config_file.exists():
                raise InputError(f"{folder} was begun by another training; give another --out")
        processes.barrier()
        job = resume_job(config, folder, processes, reporter) if config.resume else (
            new_job(config, folder, processes, reporter)
        )  # fmt: skip
        stack.callback(job.log.close)
        reporter.start(job.state.progress.step, job.config.recipe.steps)
        try:
            run(job)
        finally:
            reporter.finish()
        return finish(job)


def new_job(
    config: TrainConfig, folder: RunFolder, processes: Processes, reporter: Reporter
) -> Job:
    """Set up a run from its first step and write what the folder says about it."""
    origin = RunFolder.open(config.init) if config.init else None
    source = origin.config() if origin else None
    channels = config.channels or (source.preprocess.channels if source else None)
    data = open_data(config.data, channels=channels, seed=config.seed or 0)
    data, found = without_quarantined(data, folder, config.quarantine, processes, reporter)
    inherited = what_it_keeps(source) if source else {}
    recipe, notes = new_recipe(config, data, processes.world, inherited)
    if source is not None:
        preprocess = dataclasses.replace(source.preprocess, size=recipe.image_size, fit=recipe.fit)
    else:
        mean, std = pixel_statistics(data.splits["train"])
        preprocess = Preprocess(recipe.image_size, recipe.fit, data.channels, mean, std)
    arguments: dict[str, Any] = {
        "name": recipe.model,
        "num_classes": len(data.classes),
        "image_size": list(recipe.image_size),
        "channels": data.channels,
        **recipe.model_options,
    }
    torch.manual_seed(recipe.seed)
    model = create(**arguments)
    if origin is not None:
        notes.append(start_from(model, origin, data))
    run_config = RunConfig(
        recipe=recipe,
        model=arguments,
        classes=data.classes,
        preprocess=preprocess,
        segments=(segment(0, {}, processes),),
        notes=(*data.notes, *found, *notes),
    )
    job = assemble(run_config, folder, data, model, processes, reporter)
    if origin is None:
        initialise(job)
    for note in run_config.notes:
        reporter.say(note)
    job = with_measured(job)
    if processes.main:
        with folder.writing():
            write_json(folder.split_file, data.record())
            write_json(folder.environment_file, environment(processes.device, processes.world))
            folder.write_config(job.config)  # last: with it the run has begun
    return job


def resume_job(
    config: TrainConfig, folder: RunFolder, processes: Processes, reporter: Reporter
) -> Job:
    """Set up a run from its last checkpoint, and record the segment that begins."""
    stored = folder.config()
    data = folder.data()
    recipe, changed = resumed_recipe(stored.recipe, config, data, processes.world)
    torch.manual_seed(recipe.seed)
    model = create(**stored.model)
    if stored.recipe.init is not None and not folder.saved_steps():
        start_from(model, RunFolder.open(stored.recipe.init), data)
    steps = folder.saved_steps()
    step = steps[-1] if steps else 0
    if config.minutes is None and recipe.steps < step:
        raise InputError(
            f"{recipe.steps} steps are asked for, but the run has made {step}; give more, or start "
            "a new run without --resume"
        )
    if processes.main:
        with folder.writing():
            folder.sweep()
            folder.forget_metrics_after(step)
    processes.barrier()
    run_config = dataclasses.replace(stored, recipe=recipe)
    job = assemble(run_config, folder, data, model, processes, reporter)
    if config.minutes is not None:
        job = with_measured(job)
        job = with_recipe(job, steps=step + job.config.recipe.steps)
    if steps:
        load_checkpoint(folder.checkpoint(step), job.state)
    elif stored.recipe.init is None:
        initialise(job)
    reporter.say(f"going on after step {step} of {job.config.recipe.steps}")
    changed = {name: getattr(job.config.recipe, name) for name in changed}
    now = segment(step, changed, processes)
    before = stored.segments[-1]
    if now.threads != before.threads:
        reporter.say(
            f"{now.threads} threads instead of {before.threads}: sums are rounded differently, so "
            "the weights will differ in their last bits from an uninterrupted run"
        )
    run_config = dataclasses.replace(job.config, segments=(*stored.segments, now))
    if processes.main:
        with folder.writing():
            folder.write_config(run_config)
    processes.barrier()
    return dataclasses.replace(job, config=run_config)


def assemble(
    config: RunConfig,
    folder: RunFolder,
    data: Data,
    model: nn.Module,
    processes: Processes,
    reporter: Reporter,
) -> Job:
    """The job of a config: model, optimizers and batches, at step 0."""
    recipe = config.recipe
    if data.splits["train"].source.has_files and recipe.memory:
        data = remember(data, int(recipe.memory * 1e9), workers=recipe.workers)
        reporter.say(data.notes[-1])
    split = data.splits["train"]
    reference = reference_images(model, data, config.preprocess)
    wrapped = processes.wrap(model)
    optimizers = build_optimizers(model, recipe.optimizer, recipe.lr, recipe.weight_decay)
    batches = TrainBatches(
        split,
        config.preprocess,
        recipe.augment,
        batch_size=recipe.batch_size,
        microbatch=recipe.microbatch,
        seed=recipe.seed,
        workers=recipe.workers,
        rank=processes.rank,
        world=processes.world,
    )
    weights = None
    if recipe.class_weights == "auto":
        weights = inverse_frequency(split.labels, len(data.classes)).to(processes.device)
    log = MetricsLog(
        folder,
        reporter,
        steps=recipe.steps,
        epoch_steps=len(split) / recipe.batch_size,
        batch_size=recipe.batch_size,
        writes=processes.main,
        tensorboard=recipe.tensorboard,
    )
    return Job(
        config=config,
        folder=folder,
        data=data,
        batches=batches,
        processes=processes,
        model=wrapped,
        state=TrainState(model, optimizers, recipe.ema),
        class_weights=weights,
        reference=None if reference is None else reference.to(processes.device),
        checkpoints=Checkpoints(folder, recipe.keep, processes.rank),
        log=log,
        reporter=reporter,
    )


def initialise(job: Job) -> None:
    """Let a model that starts from statistics of images take them."""
    take = getattr(job.state.model, "initialise_from", None)
    if take is not None:
        take(job.reference)


def with_measured(job: Job) -> Job:
    """The job with what "auto" precision and --minutes leave to a measurement, said aloud.

    Called before anything is loaded: measuring changes the weights, which are put back.
    """
    recipe, notes = job.config.recipe, []
    kept = {name: tensor.detach().clone() for name, tensor in job.state.model.state_dict().items()}
    if recipe.precision == "auto":
        precision, words = choose_precision(job)
        job = with_recipe(job, precision=precision)
        notes.append(f"precision {words}")
    if recipe.minutes is not None:
        steps, words = plan_steps(job)
        job = with_recipe(job, steps=steps)
        notes.append(words)
    with torch.no_grad():
        for name, tensor in job.state.model.state_dict().items():
            tensor.copy_(kept[name])
    for note in notes:
        job.reporter.say(note)
    noted = dataclasses.replace(job.config, notes=(*job.config.notes, *notes))
    return dataclasses.replace(job, config=noted)


def finish(job: Job) -> TrainResult:
    """Measure the weights that are kept on the held-out images and write what was found."""
    state, folder = job.state, job.folder
    best = state.progress.best_step
    seconds = state.progress.seconds
    if not state.ema and best != state.progress.step:
        load_checkpoint(folder.checkpoint(best), state)
    with state.evaluated_weights():
        found = predict_split(
            state.model,
            job.data,
            held_out(job.data),
            job.config,
            job.processes.device,
            job.processes,
        )
    if job.processes.main:
        with folder.writing():
            write_evaluation(folder, found)
    return TrainResult(folder.path, found, seconds / 60)


def segment(step: int, changed: dict[str, Any], processes: Processes) -> Segment:
    """A segment that begins now, on these processes."""
    return Segment(
        from_step=step,
        changed=changed,
        processes=processes.world,
        threads=torch.get_num_threads(),
        device=processes.device.type,
    )


def inverse_frequency(labels: np.ndarray, classes: int) -> Tensor:
    """w_c = n / (k n_c): each class weighs the same in all, and the mean over the images is 1."""
    counts = np.bincount(labels, minlength=classes)
    return torch.from_numpy(len(labels) / (classes * counts)).float()


def run_name(data: str) -> str:
    """A folder name for runs on this data: its last part, letters and digits only."""
    stem = Path(data).name.split(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-") or "run"
