"""What a run says while it goes on: a progress bar with the time left, and lines above it."""

import time
from collections.abc import Callable
from typing import Any

from regard.errors import MissingExtraError, duration

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
