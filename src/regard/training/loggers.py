"""What a run says while it goes on: a progress bar with the time left, and lines above it."""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from regard.errors import MissingExtraError, duration
from regard.training.checkpoint import Progress
from regard.training.health_probe import Health
from regard.training.run_folder import RunFolder

SILENCE = 60  # seconds after which a line says how far it is, where there is no bar


class Reporter:
    """Speaks for the main process; on the others, and with `quiet`, it is silent.

    On a terminal there is a bar; elsewhere only the lines given to `say`.
    """

    def __init__(self, *, quiet: bool = False, say: Callable[[str], None] | None = None) -> None:
        self.quiet = quiet
        self._say = say
        self._bar: Any = None
        self._task: Any = None
        self._total = 0
        self._work: Callable[[int], float] = float
        self._start = (0.0, 0.0)
        self._spoken = 0.0

    def say(self, line: str) -> None:
        """One line for people."""
        if self.quiet:
            return
        if self._say is not None:
            self._say(line)
        elif self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, flush=True)

    def start(self, done: int, total: int, work: Callable[[int], float] = float) -> None:
        """Show the bar, with `done` of `total` steps behind.

        `work` tells how much is done after so many steps, where they do not take the same time.
        """
        self._total, self._work, self._start = total, work, (time.monotonic(), work(done))
        self._spoken = time.monotonic()
        if self.quiet or self._say is not None:
            return
        try:
            from rich import progress
        except ImportError:
            raise MissingExtraError("rich", "train", "the progress bar") from None
        bar = progress.Progress(
            progress.TextColumn("{task.percentage:>3.0f}%"),
            progress.BarColumn(),
            progress.TextColumn("step {task.fields[step]} of {task.fields[steps]}"),
            progress.TextColumn("{task.fields[numbers]}"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("left"),
            transient=True,
        )
        if bar.console.is_terminal:
            self._bar = bar
            self._bar.start()
            self._task = self._bar.add_task(
                "", total=work(total), completed=work(done), step=done, steps=total, numbers=""
            )

    def step(self, done: int, numbers: dict[str, float]) -> None:
        """Move the bar; `numbers` are shown beside it."""
        if self._bar is None and time.monotonic() - self._spoken <= SILENCE:
            return
        words = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        if self._bar is not None:
            self._bar.update(self._task, completed=self._work(done), step=done, numbers=words)
        self.milestone(done, words)

    def milestone(self, done: int, words: str) -> None:
        """A line with the time left, where there is no bar to show it."""
        if self._bar is None:
            self._spoken = time.monotonic()
            since, first = self._start
            now, total = self._work(done), self._work(self._total)
            left = (time.monotonic() - since) * (total - now) / (now - first) if now > first else 0
            self.say(f"step {done} of {self._total}: {words}, {duration(left)} left")

    def finish(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


# Numbers of a run, as lines of metrics.jsonl, beside the progress bar, and for TensorBoard.


MOST_LINES = 2000  # about so many lines for the steps of a run, however long


class MetricsLog:
    """Writes where `writes` is true (the main process) and reports through `reporter`.

    A line has "step", counted from 1, and either the numbers of the steps since the last line
    (their mean loss), those of an evaluation ("accuracy", …), "attention" by layer, or a "notice"
    in words.
    """

    def __init__(
        self,
        folder: RunFolder,
        reporter: Reporter,
        *,
        steps: int,
        epoch_steps: float,
        batch_size: int,
        writes: bool,
        tensorboard: bool,
    ) -> None:
        self.folder = folder
        self.reporter = reporter
        self.every = math.ceil(steps / MOST_LINES)
        self.epoch_steps = epoch_steps
        self.batch_size = batch_size
        self.lost: set[str] = set()
        self._shown: dict[str, float] = {}
        self._losses: list[float] = []
        self._since = time.monotonic()
        self.writes = writes
        self._file: IO[str] | None = None
        self._board = board(folder) if writes and tensorboard else None

    def step(
        self,
        progress: Progress,
        loss: float,
        lr: float,
        norm: float,
        unreadable: Sequence[tuple[int, str, str]],
    ) -> None:
        """Take in a step that was made."""
        for _, name, reason in unreadable:
            if name not in self.lost:
                self.lost.add(name)
                self.notice(progress.step, f"left out {name}: {reason}")
        self._losses.append(loss)
        if progress.step % self.every == 0:
            now = time.monotonic()
            line = {
                "loss": sum(self._losses) / len(self._losses),
                "lr": lr,
                "gradient_norm": norm,
                "images_per_second": len(self._losses) * self.batch_size / (now - self._since),
            }
            self._write(progress, line)
            self._losses = []
            self._since = now
            self._shown |= {"loss": line["loss"], "images/s": line["images_per_second"]}
        self.reporter.step(progress.step, self._shown)

    def evaluation(self, progress: Progress, numbers: dict[str, float]) -> None:
        """Take in the numbers of an evaluation."""
        self._write(progress, numbers)
        self._shown["accuracy"] = numbers["accuracy"]
        self.reporter.step(progress.step, self._shown)
        words = f"accuracy {numbers['accuracy']:.2%}, log-loss {numbers['log_loss']:.4f}"
        self.reporter.milestone(progress.step, words)
        self._since = time.monotonic()

    def attention(self, progress: Progress, health: Health) -> None:
        """Take in what the model's attention is like."""
        self._line({"step": progress.step, "attention": health})
        if self._board is not None:
            for name, numbers in health.items():
                for key, value in numbers.items():
                    if value is not None:
                        self._board.add_scalar(f"attention/{key}/{name}", value, progress.step)

    def notice(self, step: int, words: str) -> None:
        """Say something once, and keep it."""
        self.reporter.say(words)
        self._line({"step": step, "notice": words})

    def flush(self) -> None:
        """Bring what was written to the disk."""
        if self._file is not None:
            with self.folder.writing():
                self._file.flush()
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def _write(self, progress: Progress, numbers: dict[str, float]) -> None:
        epoch = progress.step / self.epoch_steps
        place = {"step": progress.step, "epoch": round(epoch, 3)}
        self._line({**place, "seconds": round(progress.seconds, 1), **numbers})
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, progress.step)

    def _line(self, values: dict[str, Any]) -> None:
        if self.writes:
            with self.folder.writing():
                if self._file is None:
                    self._file = self.folder.metrics_file.open("a", encoding="utf-8")
                self._file.write(json.dumps(values, allow_nan=False) + "\n")


def board(folder: RunFolder) -> Any:
    """A TensorBoard writer into the run folder."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtraError("tensorboard", "tensorboard", "--tensorboard") from None
    return SummaryWriter(str(folder.tensorboard))
