"""Numbers of a run, as lines of metrics.jsonl, beside the progress bar, and for TensorBoard."""

import json
import math
import os
import time
from collections.abc import Sequence
from typing import IO, Any

from regard.errors import MissingExtraError
from regard.runs.folder import RunFolder
from regard.runs.health import Health
from regard.runs.reporter import Reporter
from regard.runs.state import Progress

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
