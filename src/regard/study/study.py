"""Many small runs, one answer: does QK norm help on these images?"""

import dataclasses
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from regard._device import pick_device
from regard.data.dataset import Data
from regard.data.open import open_data
from regard.data.preprocess import Preprocess
from regard.errors import InputError, counted
from regard.models.registry import create
from regard.study.findings import Summary, conclusion, summarise
from regard.study.plan import (
    DEFAULTS,
    Plan,
    Settings,
    StudyFolder,
    StudyOptions,
    asked,
    check_same,
    new_grid,
)
from regard.study.study_page import write_results
from regard.study.trial import Pictures, read_pictures
from regard.study.workers import Said, cores, run_all
from regard.training.loggers import Reporter
from regard.training.presets import side_for
from regard.training.run_folder import RunFolder
from regard.training.stop import Interrupted

MOST_ON_DEVICE = 4  # an accelerator is shared by so many runs at most


@dataclass(frozen=True)
class StudyResult:
    """A finished study: its folder, its page, the conclusion in words, and every figure."""

    folder: Path
    page: Path
    conclusion: str
    summary: Summary


def study(options: StudyOptions, say: Callable[[str], None] | None = None) -> StudyResult:
    """Run a study, or what is left of one, and write its folder.

    `say` gets each line meant for people; without it they are printed, with a progress bar where
    there is a terminal.
    """
    reporter = Reporter(say=say)
    device = pick_device(options.device).type
    workers = worker_count(options.workers, device)
    folder = StudyFolder.open(options.out) if options.resume else None
    before = folder.plan() if folder else None
    settings, pictures = prepare(options, before, reporter.say)
    grid = new_grid(options, before.grid if before else None)
    if before is not None:
        check_same(before.settings, settings)
        outside = set(before.grid.runs()) - set(grid.runs())
        if outside:
            reporter.say(
                f"of the runs before, {len(outside)} are not in what is asked for now: they stay "
                "in the folder and leave the report"
            )
    if folder is None:
        folder = StudyFolder.fresh(options.out, name_of(settings.data))
    plan = Plan(settings, grid)
    with folder.lock():
        folder.write_plan(plan)
        train_missing(folder, plan, pictures, workers, device, reporter, say is not None)
        results = folder.results(grid)
        summary = summarise(settings, grid, results)
        write_results(folder, plan, summary, results)
    words = "\n\n".join(conclusion(summary, optimizer) for optimizer in grid.optimizers)
    return StudyResult(folder.path, folder.page_file, words, summary)


def prepare(
    options: StudyOptions, before: Plan | None, say: Callable[[str], None]
) -> tuple[Settings, Pictures]:
    """What the runs share, and the images; what is not asked for is as `before`, or a default."""
    if before is not None:
        options = continued(options, before.settings)
    if options.like is not None:
        data, model, preprocess, batch_size = of_run(options)
    else:
        data = open_data("digits" if options.data is None else options.data)
        size = options.image_size
        if size is None:
            size = (8, 8) if data.name == "digits" else (side_for(data),) * 2
        name = options.model
        if name is None:
            name = f"simple-vit-nano/{max(4, min(size) // 8)}"
        preprocess = Preprocess(size=size, channels=data.channels)
        model = {
            "name": name,
            "num_classes": len(data.classes),
            "image_size": list(size),
            "channels": data.channels,
        }
        batch_size = DEFAULTS["batch_size"]
    # What workers would refuse is refused here: a model without QK norm, a batch too small for it.
    built = create(**model, qk_norm=None)
    most = asked(options, "images")
    if most < 2:
        raise InputError(f"images is {most}; give at least 2")
    pictures = read_pictures(data, preprocess, most, say)
    batch_size = min(batch_size, len(pictures.labels))
    if options.batch_size is not None:
        batch_size = options.batch_size
    refuse_single(built, model["name"], batch_size)
    settings = Settings(
        data=data.name,
        like=None if options.like is None else str(options.like),
        fingerprint=data.fingerprint,
        classes=len(data.classes),
        most_images=most,
        images=len(pictures.labels),
        held_out=len(pictures.val_labels),
        chance=pictures.chance,
        model=model,
        preprocess=preprocess.to_dict(),
        steps=asked(options, "steps"),
        batch_size=batch_size,
        warmup=asked(options, "warmup"),
        weight_decay=asked(options, "weight_decay"),
    )
    return settings, pictures


def refuse_single(model: nn.Module, name: str, batch_size: int) -> None:
    """Refuse batches of one image for a model with batch norms."""
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    if batch_size < 2 and any(isinstance(module, norms) for module in model.modules()):
        raise InputError(
            f"batch_size is {batch_size}; {name} has batch norms, which need 2 images or more in "
            "training: give a larger batch size"
        )


def continued(options: StudyOptions, settings: Settings) -> StudyOptions:
    """The options of a resumed study, where what is not given is as it was."""
    like = None if settings.like is None else Path(settings.like)
    size = settings.model["image_size"]
    was: dict[str, Any] = {
        "data": None if like is not None else settings.data,
        "like": like,
        "model": None if like is not None else settings.model["name"],
        "image_size": None if like is not None else (size[0], size[1]),
        "images": settings.most_images,
        "steps": settings.steps,
        "batch_size": settings.batch_size,
        "warmup": settings.warmup,
        "weight_decay": settings.weight_decay,
    }
    return dataclasses.replace(
        options, **{k: v for k, v in was.items() if getattr(options, k) is None}
    )


def of_run(options: StudyOptions) -> tuple[Data, dict[str, Any], Preprocess, int]:
    """Images, model, preprocessing and batch size of the run to study."""
    for name in ("data", "model", "image_size"):
        if getattr(options, name) is not None:
            raise InputError(f"--like takes the run's own {name}; leave out {name} or --like")
    assert options.like is not None
    run = RunFolder.open(options.like)
    config = run.config()
    model = {k: v for k, v in config.model.items() if k != "qk_norm"}
    return run.data(), model, config.preprocess, config.recipe.batch_size


def train_missing(
    folder: StudyFolder,
    plan: Plan,
    pictures: Pictures,
    workers: int,
    device: str,
    reporter: Reporter,
    spoken: bool,
) -> None:
    """Train the runs of the plan that are not finished.

    Progress is a bar on a terminal; where there is none, or it is `spoken`, a line now and then.
    """
    runs = plan.grid.runs()
    missing = [run for run in runs if not folder.finished(run)]
    if len(missing) < len(runs):
        reporter.say(f"{len(runs) - len(missing)} of {len(runs)} runs are finished already")
    if not missing:
        return
    reporter.say(
        f"{counted(len(missing), 'run')}, {min(workers, len(missing))} at a time, on {device}"
    )
    pictures.save(folder.pictures_file)
    steps = plan.settings.steps
    said = Said(reporter.say, steps * len(missing), len(missing))
    reporter.start(0, steps * len(missing))

    def progress(done: int, finished: int) -> None:
        reporter.step(done, {"runs": finished})
        if spoken or not sys.stdout.isatty():
            said(done, finished)

    try:
        run_all(folder, missing, steps, workers, device, progress)
    except Interrupted as error:
        raise Interrupted(
            f"stopped; {resume_command(folder)} goes on without repeating finished runs",
            error.exit_code - 128,
        ) from None
    finally:
        reporter.finish()
        folder.pictures_file.unlink(missing_ok=True)


def worker_count(asked_for: int | None, device: str) -> int:
    """Runs at a time."""
    if asked_for is None:
        return cores() if device == "cpu" else min(cores(), MOST_ON_DEVICE)
    if asked_for < 1:
        raise InputError(f"workers is {asked_for}; give at least 1")
    return asked_for


def resume_command(folder: StudyFolder) -> str:
    """The command that goes on with a study."""
    return "`" + shlex.join(["regard", "study", "--out", str(folder), "--resume"]) + "`"


def name_of(data: str) -> str:
    """A folder name: the last part of the data's, letters and digits only."""
    stem = Path(data).name.split(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-") or "study"
