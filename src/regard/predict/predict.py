"""A long list of rows written in parts, so that a killed job goes on where it was.

Beside OUT stands the folder OUT.parts with a description of the job and files that hold the rows
of positions [begin, end) each, written whole or not at all. When the last is there, OUT is made
of them in one step and the folder goes: OUT exists only when it is complete.
"""

import contextlib
import glob
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard._io import atomic_write, locked, read_json, write_json
from regard.data.batches import deliver
from regard.data.decode import UnreadableImage
from regard.data.open import Pictures, open_pictures
from regard.data.preprocess import Preprocess
from regard.errors import InputError, RegardError
from regard.predict.output import Columns, Row, format_of, join
from regard.predict.predictor import Predictor, best_first, load

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


# `regard predict`: name any number of pictures, in constant memory, resumably.


@dataclass(frozen=True)
class PredictOptions:
    """Name the classes of images: a row for each, with probabilities."""

    run: Path
    """A run folder, its model.safetensors, or an exported .onnx file."""
    inputs: tuple[str, ...]
    """Images: files, folders, globs, manifests with a column path, zips, hf:NAME, stream:NAME."""
    out: Path
    """The file to write; its ending, .csv, .jsonl or .parquet, chooses the format."""
    top: int = 5
    """How many of the most probable classes to write."""
    embed: bool = False
    """Write the features before the classifier too."""
    batch_size: int = 64
    """Images in one forward pass."""
    workers: int = 0
    """Processes that read images; 0 reads them in this one."""
    device: str = "auto"
    """Where to compute: auto, cpu, cuda or mps."""
    force: bool = False
    """Replace an output, or the beginning of another, that exists."""

    def __post_init__(self) -> None:
        for name, least in (("top", 1), ("batch_size", 1), ("workers", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; give at least {least}")


@dataclass(frozen=True)
class PredictResult:
    """What was written: the file, its rows, those without a prediction, and those found done."""

    out: Path
    rows: int
    unreadable: int
    resumed: int
    seconds: float

    def __str__(self) -> str:
        new = self.rows - self.resumed
        lines = [
            f"images      {self.rows:,}",
            f"unreadable  {self.unreadable:,}"
            + (" (see the column error)" * bool(self.unreadable)),
            f"speed       {new / max(self.seconds, 1e-9):,.0f} images/s",
            f"written to  {self.out}",
        ]
        if self.resumed:
            lines.insert(1, f"resumed at  {self.resumed:,}")
        return "\n".join(lines)


def predict(options: PredictOptions, say: Callable[[str], None] | None = None) -> PredictResult:
    """Write a row for each picture; killed and called again, it repeats and loses none.

    A picture that cannot be read becomes a row with the reason. Under torchrun each process
    writes a shard of its own, OUT-00000-of-00002.csv and so on, which together hold every picture
    exactly once. `say` is told of the progress.

    Raises:
        InputError: for an unknown format, an input without pictures, a run without weights, an
            output that exists, or the beginning of another job in its place.
    """
    format_of(options.out)
    rank, world, here = process()
    out = shard_path(options.out, rank, world)
    check_shards(options.out, world)
    device = options.device
    if world > 1 and device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{here}"
    predictor = load(options.run, device=device)
    if options.embed:
        predictor.check_features()
    pictures = open_pictures(options.inputs, predictor.preprocess.channels)
    columns = Columns(min(options.top, len(predictor.classes)), options.embed)
    begin, end = (len(pictures) * place // world for place in (rank, rank + 1))
    parts = Parts(out, columns, begin, end)
    started, unreadable = time.perf_counter(), 0
    with parts.open(job(predictor, pictures, columns, begin, end), options.force) as first:
        if first > begin and say:
            say(f"going on at image {first:,} of {end:,}")
        for rows in each_batch(predictor, pictures, columns, first, end, options):
            parts.add(rows)
            unreadable += sum("error" in row for row in rows)
            if say and not parts.waiting:
                say(f"{parts.done:,} of {end:,}")
        parts.finish()
    seconds = time.perf_counter() - started
    return PredictResult(out, end - begin, unreadable, first - begin, seconds)


def each_batch(
    predictor: Predictor,
    pictures: Pictures,
    columns: Columns,
    first: int,
    end: int,
    options: PredictOptions,
) -> Iterator[list[Row]]:
    """The rows of the pictures [first, end), batch by batch, in order."""
    size = options.batch_size if predictor.takes == "tensor" else 1
    reader = Reader(pictures, predictor.preprocess if predictor.takes == "tensor" else None)
    tasks = ((start, min(start + size, end)) for start in range(first, end, size))
    for names, prepared, errors in deliver(reader, tasks, options.workers):
        best = best_rows(predictor, columns, prepared)
        yield [
            {"path": name, "error": errors[place]}
            if place in errors
            else columns.read(name, *next(best))
            for place, name in enumerate(names)
        ]


class Reader:
    """Reads and fits the pictures [begin, end): names, what could be read, reasons for the rest.

    The reasons are by place in the batch. Without `preprocess` pictures stay as they are.
    """

    def __init__(self, pictures: Pictures, preprocess: Preprocess | None) -> None:
        self.pictures = pictures
        self.preprocess = preprocess

    def __call__(self, begin: int, end: int) -> tuple[list[str], Tensor, dict[int, str]]:
        prepared: list[Tensor] = []
        errors: dict[int, str] = {}
        for place, item in enumerate(range(begin, end)):
            try:
                picture = self.pictures.read(item)
            except UnreadableImage as error:
                errors[place] = error.reason
            else:
                fitted = picture if self.preprocess is None else self.preprocess.fitted(picture)
                prepared.append(fitted)
        names = [self.pictures.name(item) for item in range(begin, end)]
        return names, torch.stack(prepared) if prepared else torch.empty(0), errors


def best_rows(
    predictor: Predictor, columns: Columns, prepared: Tensor
) -> Iterator[tuple[list[tuple[str, float]], np.ndarray | None]]:
    """The most probable classes of each picture, and its features where they are wanted."""
    features: Any = None
    if columns.embed:
        probabilities, features = predictor.features(prepared)
        features = features.numpy()
    else:
        probabilities = predictor.probabilities(prepared)
    values = probabilities.numpy()
    for row, best in enumerate(best_first(values, columns.top)):
        pairs = [(predictor.classes[i], float(values[row, i])) for i in best]
        yield pairs, None if features is None else features[row]


def job(
    predictor: Predictor, pictures: Pictures, columns: Columns, begin: int, end: int
) -> dict[str, Any]:
    """What must be the same for a beginning to be gone on with."""
    names = hashlib.sha256()
    for item in range(len(pictures)):
        names.update(pictures.name(item).encode() + b"\0")
    return {
        "model": predictor.identity,
        "images": names.hexdigest(),
        "positions": [begin, end],
        "columns": columns.names(),
    }


def process() -> tuple[int, int, int]:
    """Rank, number of processes, and rank on this machine, as torchrun tells them."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    rank, world, here = (int(os.environ.get(n, d)) for n, d in zip(names, "010", strict=True))
    return rank, world, here


def shard_path(out: Path, rank: int, world: int) -> Path:
    """The file of one process: `out` itself where there is one process."""
    if world == 1:
        return out
    return out.with_name(f"{out.stem}-{rank:05d}-of-{world:05d}{out.suffix}")


def check_shards(out: Path, world: int) -> None:
    """Refuse to write beside the shards of another number of processes."""
    others = [
        path.name
        for path in out.parent.glob(f"{glob.escape(out.stem)}-?????-of-?????{out.suffix}*")
        if f"-of-{world:05d}" not in path.name
    ]
    if others and world > 1:
        raise InputError(
            f"{out.parent} holds {min(others)}, a shard of another number of processes; remove "
            "those shards, use as many processes, or give another --out"
        )
