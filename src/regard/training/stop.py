"""Ctrl-C and SIGTERM ask a run to stop after the step it is in."""

import signal
import threading
from types import FrameType, TracebackType

from regard.errors import RegardError


class Interrupted(RegardError):
    """A run was asked to stop and did, with everything saved; the exit code is the signal's."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class StopSignal:
    """Within `with StopSignal() as stop`, SIGINT and SIGTERM set `stop.number`.

    A second Ctrl-C ends the process at once, as without us. Outside the main thread, where Python
    takes no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.number = 0
        self._previous: dict[int, object] = {}

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
