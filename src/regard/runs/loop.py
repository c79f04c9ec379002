"""The training loop."""

import math
import signal
import time

from regard.runs.evaluate import predict_split
from regard.runs.job import Job
from regard.runs.metrics import NotFiniteAnswer
from regard.runs.optimizer import set_rate
from regard.runs.reference import calibrate
from regard.runs.schedule import rate
from regard.runs.sizes import brought_to, size_multiple, training_size
from regard.runs.state import whole
from regard.runs.step import accumulate, clip_gradient, scale_gradient
from regard.runs.stop import StopSignal
from regard.runs.trouble import bad_answer, interrupted, not_finite, unreadable
from regard.runs.watch import LossWatch


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
