"""Quick measurements before a run: which number format is faster, how many steps fit a time."""

import functools
import math
import time
from collections.abc import Callable
from statistics import median

import torch

from regard.training.calibration import calibrate
from regard.training.schedule import brought_to, mean_step, size_multiple, training_size
from regard.training.step import Job, accumulate, clip_gradient

WORTH = 1.05  # bf16 must be faster by this factor: it costs accuracy
SHARE = 0.05  # of the planned time may go into planning it


def with_measured(job: Job) -> Job:
    """The job with what "auto" precision and --minutes leave to a measurement, said aloud.

    Called before anything is loaded: measuring changes the weights, which are put back.
    """
    recipe, notes = job.config.recipe, []
    kept = {name: tensor.detach().clone() for name, tensor in job.state.model.state_dict().items()}
    if recipe.precision == "auto":
        precision, words = choose_precision(job)
        job = job.with_recipe(precision=precision)
        notes.append(f"precision {words}")
    if recipe.minutes is not None:
        steps, words = plan_steps(job)
        job = job.with_recipe(steps=steps)
        notes.append(words)
    with torch.no_grad():
        for name, tensor in job.state.model.state_dict().items():
            tensor.copy_(kept[name])
    return job.noted(*notes)


def choose_precision(job: Job) -> tuple[str, str]:
    """ "fp32" or "bf16", whichever trains faster here, and why, in words.

    A product of two 256 × 256 matrices goes first: where a processor has no bf16 arithmetic it is
    up to a hundred times slower, and a whole step would take minutes.
    """
    device = job.processes.device
    square = torch.randn(256, 256, device=device, generator=torch.Generator(device).manual_seed(0))
    half = square.bfloat16()
    ratio = seconds(lambda: square @ square, device) / seconds(lambda: half @ half, device)
    ratio = job.processes.of_main(ratio)
    if ratio < 1:
        return "fp32", f"fp32, as a bf16 matrix product takes {1 / ratio:.1f} times as long here"
    times = {}
    batch = job.batches.at(0).to(device)
    for precision in ("fp32", "bf16"):
        trial = job.with_recipe(precision=precision)
        times[precision] = seconds(functools.partial(accumulate, trial, batch), device)
        job.state.model.zero_grad()
    ratio = job.processes.of_main(times["fp32"] / times["bf16"])
    if ratio < WORTH:
        return "fp32", f"fp32, as bf16 steps are only {ratio:.2f} times as fast here"
    return "bf16", f"bf16, as its steps are {ratio:.2f} times as fast as fp32"


def plan_steps(job: Job) -> tuple[int, str]:
    """How many steps fit into the recipe's minutes, and why, in words.

    Times real steps, reading included, and evaluations; the optimizers' state is empty again
    afterwards, the weights are not as before.
    """
    recipe, multiple = job.config.recipe, size_multiple(job.state.model)
    start = time.monotonic()
    step = time_step(job, recipe.image_size)
    if recipe.start_size is not None:
        first = time_step(job, training_size(recipe, 0, multiple))
        step = mean_step(recipe, multiple, first, step)
    evaluation = time_evaluation(job)
    left = job.processes.of_main(60 * (recipe.minutes or 0) - (time.monotonic() - start))
    steps = fitting_steps(left, step, evaluation, job.evaluation_interval())
    words = f"{steps} steps of {1000 * step:.0f} ms and their evaluations of {evaluation:.1f} s"
    passes = steps * recipe.batch_size / len(job.data.splits["train"])
    return steps, f"{words} fit into {recipe.minutes:g} minutes: {passes:.1f} passes"


def fitting_steps(left: float, step: float, evaluation: float, interval: int) -> int:
    """The most steps, at least 1, that end within `left` seconds, evaluations included.

    There is one after every `interval` steps, and one after the last step.
    """
    rounds = max(0, math.floor((left - evaluation) / (interval * step + evaluation)))
    rest = left - rounds * (interval * step + evaluation) - evaluation
    return max(1, rounds * interval + max(0, min(interval, math.floor(rest / step))))


def time_evaluation(job: Job) -> float:
    """The time in seconds that one evaluation will take, reading left out: from one batch."""
    recipe, device = job.config.recipe, job.processes.device
    count = len(job.data.splits["val"]) / job.processes.world
    size = min(recipe.microbatch, math.ceil(count))
    blank = torch.zeros(size, job.config.preprocess.channels, *recipe.image_size, device=device)
    model = job.state.model
    with job.state.evaluated_weights():
        once = time.monotonic()
        calibrate(model, job.reference)
        once = time.monotonic() - once
        with torch.inference_mode():
            each = seconds(lambda: model(blank), device, repeats=2)
    return job.processes.of_main(once + each * math.ceil(count / size))


def time_step(job: Job, size: tuple[int, int]) -> float:
    """The median time in seconds of real steps at this image size, the same on all processes."""
    recipe = job.config.recipe
    batches = job.batches.start(0)
    times: list[float] = []
    wanted = 3
    while len(times) < wanted:
        before = time.monotonic()
        batch = brought_to(next(batches).to(job.processes.device), size)
        accumulate(job, batch)
        clip_gradient(job.state.model, recipe.clip)
        for optimizer in job.state.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        times.append(time.monotonic() - before)
        if len(times) == wanted == 3:
            fitting = SHARE * 60 * (recipe.minutes or 0) / times[-1]
            wanted = job.processes.of_main(int(min(max(fitting, 3), 30)))
    for optimizer in job.state.optimizers:
        optimizer.state.clear()
    return job.processes.of_main(median(times[1:]))


def seconds(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """The shortest time of `work` after a call to warm up: other programs can only add to it."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            getattr(torch, device.type).synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])
