"""A long list of rows written in parts, so that a killed job goes on where it was.

Beside OUT stands the folder OUT.parts with a description of the job and files that hold the rows
of positions [begin, end) each, written whole or not at all. When the last is there, OUT is made
of them in one step and the folder goes: OUT exists only when it is complete.
"""

import contextlib
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regard.deploy.rows import Columns, Row, format_of, join
from regard.errors import InputError, RegardError
from regard.files import atomic_write, read_json, write_json
from regard.locks import locked

ROWS = 2048
SECONDS = 30.0


class Parts:
    """The parts of one output, of positions [begin, end) of a list."""

    def __init__(self, out: Path, columns: Columns, begin: int, end: int) -> None:
        self.out = out
        self.columns = columns
        self.begin = begin
        self.end = end
        self.format = format_of(out)
        self.folder = out.with_name(out.name + ".parts")
        self.job_file = self.folder / "job.json"
        self.waiting: list[Row] = []
        self.done = begin
        self.written_at = time.monotonic()

    @contextlib.contextmanager
    def open(self, job: dict[str, Any], force: bool) -> Iterator[int]:
        """Begin, or go on; yields the position of the first row that is missing.

        Refuses an output that exists and a folder of another job, unless `force` removes them.
        """
        if not self.out.parent.is_dir():
            raise InputError(f"{self.out.parent} is no folder; create it first")
        if self.out.exists() and not force:
            raise InputError(f"{self.out} exists already; give another --out, or --force")
        try:
            self.folder.mkdir(exist_ok=True)
            with locked(
                self.folder / ".lock",
                lambda holder: (
                    f"{self.out} is being written by another process; wait for it or stop it"
                ),
            ):
                self._adopt(job, force)
                yield self.done
        except OSError as error:
            raise RegardError(
                f"{error.filename or self.folder} cannot be used ({error.strerror or error}); "
                f"the rows up to {self.done:,} are safe, and the same command goes on"
            ) from error

    def _adopt(self, job: dict[str, Any], force: bool) -> None:
        held = read_json(self.job_file) if self.job_file.exists() else None
        if held is not None and held != job:
            if not force:
                different = sorted(k for k in job if held.get(k) != job[k])
                raise InputError(
                    f"{self.folder} holds the beginning of another job (different: "
                    f"{', '.join(different)}); finish that one, or --force drops it"
                )
            for path in self.folder.glob("*-*"):
                path.unlink()
        write_json(self.job_file, job)
        for begin, end in self._positions():
            if begin != self.done:
                raise InputError(
                    f"{self.folder} lacks the rows from {self.done} to {begin}; remove the folder "
                    "to begin anew"
                )
            self.done = end

    def _positions(self) -> list[tuple[int, int]]:
        pattern = re.compile(r"(\d+)-(\d+)" + re.escape(self.out.suffix))
        matches = (pattern.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted((int(m[1]), int(m[2])) for m in matches if m)

    def path(self, begin: int, end: int) -> Path:
        """The file of one part."""
        return self.folder / f"{begin:010d}-{end:010d}{self.out.suffix}"

    def add(self, rows: list[Row]) -> None:
        """Take the rows of one whole batch, and write a part now and then."""
        self.waiting += rows
        late = time.monotonic() - self.written_at > SECONDS
        if len(self.waiting) >= ROWS or late or self.done + len(self.waiting) == self.end:
            self.flush()

    def flush(self) -> None:
        """Write the rows that wait as a part."""
        if self.waiting:
            end = self.done + len(self.waiting)
            with atomic_write(self.path(self.done, end)) as part:
                self.format.write(self.waiting, part, self.columns)
            self.done, self.waiting = end, []
        self.written_at = time.monotonic()

    def finish(self) -> None:
        """Make the output of the parts, and remove them."""
        if self.done != self.end:
            raise RuntimeError(f"rows up to {self.done} of {self.end} were written")
        join([self.path(*place) for place in self._positions()], self.out, self.columns)
        shutil.rmtree(self.folder)
