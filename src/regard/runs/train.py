"""One training run, from a request to a finished folder."""

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from regard.errors import InputError
from regard.runs.checkpoint import load_checkpoint
from regard.runs.config import TrainConfig
from regard.runs.evaluate import held_out, predict_split, write_evaluation
from regard.runs.folder import RunFolder
from regard.runs.job import Job
from regard.runs.loop import run
from regard.runs.metrics import Evaluation
from regard.runs.processes import Processes
from regard.runs.reporter import Reporter
from regard.runs.setup import new_job, resume_job
from regard.runs.sizes import size_multiple, work_done


@dataclass(frozen=True, eq=False)
class TrainResult:
    """A finished run: its folder, and how well it did on the images held out."""

    folder: Path
    evaluation: Evaluation
    minutes: float
    """Time spent in the loop, over all segments."""
    main: bool = True
    """Whether this process is the one of several that writes and speaks."""

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
    if settings and not config.data:
        config = dataclasses.replace(config, data=settings.data)
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
            stack.enter_context(gone_unless_begun(folder))
            stack.enter_context(folder.lock())
            if not config.resume and folder.config_file.exists():
                raise InputError(f"{folder} was begun by another training; give another --out")
        processes.barrier()
        job = resume_job(config, folder, processes, reporter) if config.resume else (
            new_job(config, folder, processes, reporter)
        )  # fmt: skip
        stack.callback(job.log.close)
        recipe = job.config.recipe
        work = work_done(recipe, size_multiple(job.state.model))
        reporter.start(job.state.progress.step, recipe.steps, work)
        try:
            run(job)
        finally:
            reporter.finish()
        return finish(job)


@contextlib.contextmanager
def gone_unless_begun(folder: RunFolder) -> Iterator[None]:
    """Leave no folder behind where a run is refused before it has begun."""
    made = [path for path in (folder.path, *folder.path.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        if folder.path in made and not folder.config_file.exists():
            shutil.rmtree(folder.path, ignore_errors=True)
            with contextlib.suppress(OSError):  # another run may be in one of them by now
                for parent in made[1:]:
                    parent.rmdir()
        raise


def finish(job: Job) -> TrainResult:
    """Measure the weights that are kept on the held-out images and write what was found."""
    state, folder = job.state, job.folder
    best = state.progress.best_step
    seconds = state.progress.seconds
    if not state.ema and best != state.progress.step:
        job.reporter.say(
            f"the weights of step {best} are kept: they were the best on the val images, "
            "which flatters them a little there"
        )
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
    job.processes.barrier()
    return TrainResult(folder.path, found, seconds / 60, job.processes.main)


def run_name(data: str) -> str:
    """A folder name for runs on this data: its last part, letters and digits only."""
    stem = Path(data).name.split(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-") or "run"
