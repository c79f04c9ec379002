"""Why a run stops before its end, what is safe, and the way back, in words."""

from collections.abc import Callable

from torch import Tensor

from regard.images import Batch
from regard.runs.folder import RunStopped
from regard.runs.job import Job
from regard.runs.metrics import NotFiniteAnswer
from regard.runs.step import part_loss
from regard.runs.stop import Interrupted
from regard.runs.watch import NotFinite, diagnose, where_not_finite


def not_finite(job: Job, batch: Batch) -> NotFinite:
    """Run the step again to find out why, and offer the way back."""
    recipe, progress = job.config.recipe, job.state.progress
    parts = batch.split(recipe.microbatch)
    loss_of: Callable[[int, Batch], Tensor] = lambda i, part: part_loss(  # noqa: E731
        job, job.state.model, part, (progress.step, job.processes.rank * len(parts) + i)
    )
    job.state.model.zero_grad()
    found = [
        name for name in job.processes.gather(diagnose(job.state.model, parts, loss_of)) if name
    ]
    cause = f"first not finite: {found[0]}" if found else "run again, every part of it is finite"
    return NotFinite(
        f"the loss or its gradient at step {progress.step + 1} is not finite; {cause}. Nothing was "
        f"overwritten. {way_back_slower(job)}"
    )


def bad_answer(job: Job, error: NotFiniteAnswer) -> NotFinite:
    """Weights that answer with no finite numbers are not kept: name the module, offer a way back.

    Called while the model holds the weights that evaluation uses, on all processes together.
    """
    split = job.data.splits["val"]
    place = next(i for i in range(len(split)) if split.name(i) == error.name)
    image = job.config.preprocess(split.read(place)).to(job.processes.device)
    found = where_not_finite(job.state.model, image)
    cause = f"; first not finite: {found}" if found else ""
    return NotFinite(
        f"after step {job.state.progress.step} {error}{cause}. Nothing was overwritten. "
        f"{way_back_slower(job)}"
    )


def way_back_slower(job: Job) -> str:
    """How to go on from what is saved, and with a smaller rate, in words."""
    command = job.folder.resume_command("--lr", f"{job.config.recipe.lr / 3:.2g}")
    return f"{job.folder.way_back()}; {command} goes on at a third of the rate"


def unreadable(job: Job, batch: Batch) -> RunStopped:
    """More than half of a batch could not be read: that is no bad file but a lost disk."""
    _, name, reason = next(iter(batch.unreadable), (0, "an image", "read by another process"))
    return RunStopped(
        f"more than half of the images of step {job.state.progress.step + 1} could not be read, "
        f"such as {name} ({reason}); bring the data back. {job.folder.way_back()}"
    )


def interrupted(job: Job, number: int) -> Interrupted:
    """The clean stop after a signal."""
    return Interrupted(
        f"stopped after step {job.state.progress.step} of {job.config.recipe.steps}, saved. "
        f"{job.folder.resume_command()} goes on",
        number,
    )
