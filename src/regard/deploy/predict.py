"""`regard predict`: name any number of pictures, in constant memory, resumably."""

import glob
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.deploy.inputs import Pictures, open_pictures
from regard.deploy.parts import Parts
from regard.deploy.predictor import Predictor, best_first, load
from regard.deploy.rows import Columns, Row, format_of
from regard.errors import InputError
from regard.images import Preprocess, UnreadableImage
from regard.images.workers import deliver


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
