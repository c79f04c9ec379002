"""One training run, from a request to a finished folder: the loop."""

import contextlib
import dataclasses
import math
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from regard.errors import InputError
from regard.training.calibration import calibrate
from regard.training.checkpoint import load_checkpoint, whole
from regard.training.config import TrainConfig
from regard.training.distributed import Processes
from regard.training.evaluate import held_out, predict_split, write_evaluation
from regard.training.loggers import Reporter
from regard.training.metrics import Evaluation, NotFiniteAnswer
from regard.training.nan_diagnosis import LossWatch, bad_answer, interrupted, not_finite, unreadable
from regard.training.optimizers import set_rate
from regard.training.run_folder import RunFolder
from regard.training.schedule import brought_to, rate, size_multiple, training_size, work_done
from regard.training.setup import new_job, resume_job
from regard.training.step import Job, accumulate, clip_gradient, scale_gradient
from regard.training.stop import StopSignal

# The training loop.


def run(job: Job) -> None:
    """Train from the state's step to the recipe's last, evaluating and saving on the way."""
    recipe, state, progress = job.config.recipe, job.state, job.state.progress
    every = job.evaluation_interval()
    watch, clock, saved = LossWatch(), time.monotonic(), time.monotonic()
    multiple = size_multiple(state.model)
    state.model.train()
    batches = job.batches.start(progress.step)
    with StopSignal() as stop:
        while progress.step < recipe.steps:
            batch = next(batches).to(job.processes.device)
            batch = brought_to(batch, training_size(recipe, progress.step, multiple))
            lr = recipe.lr * rate(progress.step, recipe.steps, recipe.warmup, recipe.schedule)
            set_rate(state.optimizers, lr)
            sums = accumulate(job, batch)
            late = job.processes.main and time.monotonic() - saved > 60 * recipe.save_every
            loss_sum, weight, signals, due = job.processes.sum([*sums.tolist(), stop.number, late])
            loss = loss_sum / max(weight, 1e-12)
            if 0 < weight < recipe.batch_size:
                scale_gradient(state.model, recipe.batch_size / weight)
            norm = clip_gradient(state.model, recipe.clip)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise not_finite(job, batch)
            if weight < recipe.batch_size / 2:
                raise unreadable(job, batch)

            for optimizer in state.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            progress.step += 1
            state.update_ema()
            now = time.monotonic()
            progress.seconds, clock = progress.seconds + now - clock, now
            job.log.step(progress, loss, lr, norm, batch.unreadable)
            if watch.check(loss):
                job.log.notice(
                    progress.step, f"the loss leapt to {loss:.4g} at step {progress.step}"
                )

            if progress.step % every == 0 or progress.step == recipe.steps:
                evaluate_now(job)
                due = True
            if due or signals:
                job.log.flush()  # first: no step of a checkpoint may lack its line
                job.checkpoints.save(state)
                saved = time.monotonic()
            if signals and progress.step < recipe.steps:
                job.checkpoints.wait()
                raise interrupted(job, stop.number or signal.SIGTERM)
    job.checkpoints.wait()


def evaluate_now(job: Job) -> None:
    """Measure on the val split, note the best, and write the weights that evaluation uses."""
    state, progress = job.state, job.state.progress
    with state.evaluated_weights():
        calibrate(state.model, job.reference)
        if job.health is not None:
            job.log.attention(progress, job.health.measure(state.model))
        try:
            found = predict_split(
                state.model, job.data, "val", job.config, job.processes.device, job.processes
            )
        except NotFiniteAnswer as error:
            raise bad_answer(job, error) from None
        numbers = found.brief()
        key = (numbers["accuracy"], -numbers["log_loss"])
        better = key > (progress.best_accuracy, -progress.best_loss)
        if better:
            progress.best_step = progress.step
            progress.best_accuracy, progress.best_loss = key[0], -key[1]
        if better or state.ema:
            weights = {name: whole(tensor) for name, tensor in state.model.state_dict().items()}
            if job.processes.main:
                with job.folder.writing():
                    job.folder.write_weights(weights, job.config, progress.step)
    job.log.evaluation(progress, numbers)


# One training run, from a request to a finished folder.


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
