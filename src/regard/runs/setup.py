"""Setting a run up: from a request to a job at its first step, or at its last checkpoint."""

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.errors import InputError, counted
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
from regard.runs.folder import RunFolder
from regard.runs.health import health_probe
from regard.runs.inherit import start_from, what_it_keeps
from regard.runs.job import Job
from regard.runs.log import MetricsLog
from regard.runs.optimizer import build_optimizers
from regard.runs.prescan import without_quarantined
from regard.runs.processes import Processes
from regard.runs.reference import initialise, reference_images, takes_statistics
from regard.runs.refuse import refuse_inside, refuse_own, refuse_unfit
from regard.runs.reporter import Reporter
from regard.runs.resolve import new_recipe, resumed_recipe
from regard.runs.state import TrainState
from regard.runs.timing import with_measured


def new_job(
    config: TrainConfig, folder: RunFolder, processes: Processes, reporter: Reporter
) -> Job:
    """Set up a run from its first step and write what the folder says about it."""
    refuse_inside(folder.path, config.data)
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
    refuse_own(recipe.model_options)
    arguments: dict[str, Any] = {
        "name": recipe.model,
        "num_classes": len(data.classes),
        "image_size": list(recipe.image_size),
        "channels": data.channels,
        **recipe.model_options,
        "test_flips": recipe.test_flips == "on",
    }
    torch.manual_seed(recipe.seed)
    model = create(**arguments)
    refuse_unfit(recipe, model)
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
        initialise(job.state.model, job.reference)
    for note in run_config.notes:
        reporter.say(note)
    job = with_measured(with_health(job))
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
    refuse_unfit(recipe, model)
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
        job = job.with_recipe(steps=step + job.config.recipe.steps)
    if steps:
        load_checkpoint(folder.checkpoint(step), job.state)
    elif stored.recipe.init is None:
        initialise(job.state.model, job.reference)
    if step and step == job.config.recipe.steps:
        reporter.say(
            f"all {counted(step, 'step')} are done; --resume with more --steps trains further"
        )
    else:
        reporter.say(f"going on after step {step} of {job.config.recipe.steps}")
    job = with_health(job)
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
    refuse_sharded(model, processes)
    split = data.splits["train"]
    reference = reference_images(model, data, config.preprocess)
    wrapped = processes.wrap(model, config.recipe.compile)
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
        health=None,
        checkpoints=Checkpoints(folder, recipe.keep, processes.rank),
        log=log,
        reporter=reporter,
    )


def refuse_sharded(model: nn.Module, processes: Processes) -> None:
    """Refuse to shard a model that calibrates: it runs parts of itself outside its forward pass."""
    if processes.sharded and takes_statistics(model):
        raise InputError(
            f"{type(model).__name__} takes statistics of images before each evaluation, which "
            "fsdp cannot follow; give --strategy ddp"
        )


def with_health(job: Job) -> Job:
    """The job with a probe of attention's health on the main process, or a note why not."""
    if not job.processes.main:
        return job
    if job.processes.sharded:
        return job.noted("attention health is left out: fsdp spreads the model over processes")
    probe, why = health_probe(
        job.state.model, job.data, job.config.preprocess, job.processes.device
    )
    return dataclasses.replace(job, health=probe).noted(*([why] if why else []))


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
