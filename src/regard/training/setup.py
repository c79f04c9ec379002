"""Starting from another run: --init."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard._device import environment
from regard._io import read_json, read_weights, write_json
from regard.data.batches import TrainBatches
from regard.data.dataset import Data
from regard.data.inspection import Inspection, inspect_data, read_quarantine
from regard.data.memory_cache import remember
from regard.data.open import open_data
from regard.data.preprocess import Preprocess, pixel_statistics
from regard.errors import InputError, counted
from regard.models.pixel_resnet import PixelResNet
from regard.models.registry import create
from regard.training.autotune import with_measured
from regard.training.calibration import initialise, reference_images, takes_statistics
from regard.training.checkpoint import Checkpoints, TrainState, load_checkpoint
from regard.training.config import Recipe, RunConfig, Segment, TrainConfig
from regard.training.distributed import Processes
from regard.training.health_probe import health_probe
from regard.training.loggers import MetricsLog, Reporter
from regard.training.optimizers import build_optimizers
from regard.training.presets import new_recipe, resumed_recipe
from regard.training.run_folder import RunFolder
from regard.training.schedule import size_multiple
from regard.training.step import Job


def what_it_keeps(source: RunConfig) -> dict[str, Any]:
    """What a run given by --init decides about one that starts from its weights."""
    names = ("model", "model_options", "image_size", "fit")
    return {name: getattr(source.recipe, name) for name in names}


def start_from(model: nn.Module, origin: RunFolder, data: Data) -> str:
    """Load a run's weights; a classifier of other classes stays new. What was done, in words."""
    source = origin.config()
    weights = read_weights(origin.weights_file)
    same = source.classes == data.classes
    skipped = set() if same else classifier_keys(source.model)
    own = model.state_dict()
    for name, tensor in own.items():
        if name not in skipped and (name not in weights or weights[name].shape != tensor.shape):
            raise InputError(
                f"the weights of {origin} do not fit this model: {name} is "
                f"{tuple(tensor.shape)} here; leave out --model and --model-options, so that they "
                "are the run's"
            )
    model.load_state_dict({n: own[n] if n in skipped else weights[n] for n in own})
    head = (
        "its classifier too" if same else f"with a new classifier for {len(data.classes)} classes"
    )
    return f"starting from the weights of {origin}, {head}"


def classifier_keys(arguments: dict[str, Any]) -> set[str]:
    """The weights whose shape follows the number of classes."""
    with torch.device("meta"):
        one = create(**arguments).state_dict()
        more = create(**{**arguments, "num_classes": arguments["num_classes"] + 1}).state_dict()
    return {name for name in one if one[name].shape != more[name].shape}


# Requests for a run that cannot be meant.


# Options of the models that other parts of a request decide.
OWN = {
    "name": "--model",
    "num_classes": "the data",
    "channels": "--channels",
    "image_size": "--image-size",
    "test_flips": "--test-flips",
}


def refuse_own(model_options: Mapping[str, Any]) -> None:
    """Refuse options of the model that something else of the request decides."""
    for name in model_options:
        if name in OWN:
            raise InputError(f"--model-options gives {name}, which {OWN[name]} decides; use that")


def refuse_unfit(recipe: Recipe, model: nn.Module) -> None:
    """Refuse a recipe that this model cannot be trained by."""
    refuse_start_size(recipe, model)
    refuse_single_images(recipe, model)
    refuse_optimizer(recipe, model)


def refuse_start_size(recipe: Recipe, model: nn.Module) -> None:
    """Refuse a first size that the model cannot cut into its patches."""
    unit = size_multiple(model)
    start = recipe.start_size
    if start is not None and (start[0] % unit[0] or start[1] % unit[1]):
        raise InputError(
            f"start_size is {start[0]} {start[1]}; this model takes multiples of {unit[0]} and "
            f"{unit[1]}"
        )


def refuse_single_images(recipe: Recipe, model: nn.Module) -> None:
    """Refuse microbatches of one image for a model whose norms take statistics over a batch."""
    if takes_statistics(model) and recipe.microbatch < 2:
        raise InputError(
            f"a batch of {recipe.batch_size} in microbatches of {recipe.microbatch}; the batch "
            "norms of this model need 2 images or more at a time: raise --batch-size or "
            "--microbatch"
        )


def refuse_optimizer(recipe: Recipe, model: nn.Module) -> None:
    """Refuse a model that the optimizer has no rates for."""
    if recipe.optimizer == "muon-sgd" and not isinstance(model, PixelResNet):
        raise InputError(
            "the optimizer muon-sgd has rates for PixelResNet alone, and this is a "
            f"{type(model).__name__}; give --optimizer muon or adamw"
        )


def refuse_inside(out: Path, data: str) -> None:
    """Refuse a run folder among the training images, which it would become a class of."""
    if data.strip() and Path(data).is_dir() and out.resolve().is_relative_to(Path(data).resolve()):
        raise InputError(
            f"{out} lies in the training data {data}, where it would be taken for pictures; give "
            "an --out outside"
        )


# The scan of every picture before a first training, and what it leaves out.


def without_quarantined(
    data: Data, folder: RunFolder, given: Path | None, processes: Processes, reporter: Reporter
) -> tuple[Data, list[str]]:
    """The data without the pictures on the run's quarantine list, and remarks for people.

    The list is `given`, or made by scanning every picture (pictures unchanged since an earlier
    scan are not read again; streamed ones are not scanned). It is kept in the run folder, so that
    the run stays whole.
    """
    source = data.splits["train"].source
    if not source.has_files:
        return data, []
    if source.streamed and given is None:
        return data, ["streamed data are not scanned before training; regard inspect scans them"]
    notes: list[str] = []
    if processes.main:
        if given is not None:
            read_quarantine(given, data)  # refused here if it is another data's
            quarantine = read_json(given)
        else:
            found = scan_aloud(data, reporter)
            quarantine, notes = found.quarantine(), findings(found)
        with folder.writing():
            write_json(folder.quarantine_file, quarantine)
    notes = processes.of_main(notes)
    return data.without(read_quarantine(folder.quarantine_file, data)), notes


def scan_aloud(data: Data, reporter: Reporter) -> Inspection:
    """`inspect_data` with the run's progress bar."""
    started = False

    def progress(done: int, total: int) -> None:
        nonlocal started
        if not started:
            reporter.start(done, total)
            started = True
        reporter.step(done, {})

    try:
        return inspect_data(data, progress=progress)
    finally:
        reporter.finish()


def findings(found: Inspection) -> list[str]:
    """A line for each kind of trouble found."""
    notes = []
    if found.unreadable:
        first = found.unreadable[0]
        notes.append(
            f"unreadable and left out: {counted(len(found.unreadable), 'picture')}, such as "
            f"{found.name(first)} ({found.fact(first).reason}); quarantine.json names all"
        )
    if found.leaks:
        notes.append(
            f"held-out pictures that are also trained on: {len(found.leaks):,}, which makes the "
            "score look better than it is; regard inspect shows them, and its --leaks leaves them "
            "out"
        )
    if found.conflicts:
        notes.append(
            f"pairs of pictures that show the same under different labels: "
            f"{len(found.conflicts):,}; regard inspect shows them"
        )
    return notes


# Setting a run up: from a request to a job at its first step, or at its last checkpoint.


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
