"""Runs in parallel processes of one thread each."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from regard.errors import InputError, RegardError, duration
from regard.study.plan import Run, StudyFolder, line
from regard.study.trial import Pictures, trial
from regard.training.stop import Interrupted, StopSignal


class WorkerFailed(RuntimeError):
    """A worker met an error that is not the user's."""


#: Told (finished steps, runs finished) whenever there is news.
Progress = Callable[[int, int], None]


def run_all(
    folder: StudyFolder, runs: list[Run], steps: int, workers: int, device: str, progress: Progress
) -> None:
    """Train `runs`, each of `steps` steps, on at most `workers` processes at a time.

    Each finished run is in the folder before `progress` hears of it, so whatever ends this
    process, only runs under way are lost. Idle workers are given the next run in order. Raises
    `Interrupted` soon after SIGINT or SIGTERM, and what a worker refuses as `InputError`.
    """
    waiting = list(reversed(runs))
    under_way: dict[int, int] = {}
    finished = 0
    news: queue.Queue[tuple[int, str]] = queue.Queue()
    with StopSignal() as stop, processes(folder, min(workers, len(runs)), device, news) as pool:
        for first, process in enumerate(pool):
            send(process, waiting.pop())
            under_way[first] = 0
        while under_way:
            number, text = next_news(news, stop)
            message: dict[str, Any] = (
                json.loads(text) if text else {"failed": "it ended by itself\n"}
            )
            if "refused" in message:
                raise InputError(message["refused"])
            if "failed" in message:
                await_signal(stop)
                raise WorkerFailed(f"a worker of the study failed:\n{message['failed']}")
            if "step" in message:
                under_way[number] = message["step"]
            else:
                finished += 1
                del under_way[number]
                if waiting:
                    send(pool[number], waiting.pop())
                    under_way[number] = 0
            progress(finished * steps + sum(under_way.values()), finished)


def next_news(news: "queue.Queue[tuple[int, str]]", stop: StopSignal) -> tuple[int, str]:
    """The next line of any worker, unless a signal comes first."""
    while True:
        check_signal(stop)
        with contextlib.suppress(queue.Empty):
            return news.get(timeout=0.2)


def check_signal(stop: StopSignal) -> None:
    if stop.number:
        raise Interrupted("the study was stopped", stop.number)


def await_signal(stop: StopSignal, seconds: float = 1.0) -> None:
    """Wait for a signal sent to the whole process group, which ends workers sooner than us."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        check_signal(stop)
        time.sleep(0.02)


def send(process: "subprocess.Popen[str]", run: Run) -> None:
    """Give a worker its next run."""
    assert process.stdin is not None
    process.stdin.write(line(**vars(run)))
    process.stdin.flush()


@contextlib.contextmanager
def processes(
    folder: StudyFolder, count: int, device: str, news: "queue.Queue[tuple[int, str]]"
) -> Iterator[list["subprocess.Popen[str]"]]:
    """`count` workers whose lines go to `news` with their number, and "" when one ends."""
    command = [sys.executable, "-m", "regard.study.workers", str(folder), device]
    pool = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            text=True,
        )
        for _ in range(count)
    ]
    listeners = [
        threading.Thread(target=listen, args=(number, process, news), daemon=True)
        for number, process in enumerate(pool)
    ]
    try:
        for listener in listeners:
            listener.start()
        yield pool
    finally:
        for process in pool:
            process.terminate()
        for process, listener in zip(pool, listeners, strict=True):
            process.wait()
            listener.join()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()


def listen(
    number: int, process: "subprocess.Popen[str]", news: "queue.Queue[tuple[int, str]]"
) -> None:
    """Pass on a worker's lines until it ends."""
    assert process.stdout is not None
    for text in process.stdout:
        news.put((number, text))
    news.put((number, ""))


def environment() -> dict[str, str]:
    """One thread a worker, idle threads asleep, and this very regard to import."""
    here = str(Path(__file__).parents[2])
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Said:
    """Says how far a study is, at most every so many seconds, where there is no progress bar."""

    def __init__(
        self, say: Callable[[str], None], total: int, runs: int, every: float = 30
    ) -> None:
        self.say, self.total, self.runs, self.every = say, total, runs, every
        self.began = self.last = time.monotonic()

    def __call__(self, done: int, finished: int) -> None:
        now = time.monotonic()
        if now - self.last < self.every or done < self.total / 100:
            return
        self.last = now
        left = (now - self.began) * (self.total - done) / done
        self.say(f"{finished} of {self.runs} runs done, about {duration(left)} left")


# A process that trains the runs it is told: `python -m regard.study.worker FOLDER DEVICE`.
#
# It reads one run a line from its standard input, writes each finished run into the study's folder,
# and tells of its progress on its standard output, both as JSON. The end of its input, which the
# death of the study's process brings about too, is its own end. It is a program rather than a
# `multiprocessing` process so that the number of threads is set before torch is loaded, and so that
# a study can be started from a notebook or an unguarded script.


def serve(folder: StudyFolder, device: torch.device, tasks: TextIO, answers: TextIO) -> None:
    """Train every run that comes in `tasks`, until they end."""
    settings = folder.plan().settings
    pictures = Pictures.load(folder.pictures_file).to(device)

    def tell(**message: object) -> None:
        answers.write(line(**message))
        answers.flush()

    for task in tasks:
        run = Run(**json.loads(task))
        try:
            result = trial(run, settings, pictures, lambda step: tell(step=step))
            folder.write_run(run, result)
        except BrokenPipeError:
            raise
        except RegardError as error:
            tell(refused=str(error))
            return
        except Exception:
            tell(failed=traceback.format_exc())
            return
        tell(done=run.name)


def main() -> None:
    path, device = sys.argv[1:]
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the study, which ends its workers
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever else prints must not mix with the messages
    try:
        serve(StudyFolder(Path(path)), torch.device(device), sys.stdin, answers)
    except BrokenPipeError:  # the study is gone, and whoever resumes it repeats this run
        os._exit(1)


if __name__ == "__main__":
    main()
