"""scikit-learn's embedded digits: 1,797 grey pictures of 8 x 8 pixels, no download."""

import csv
import glob
import itertools
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.dataset import Data, Source
from regard.data.decode import check_channels, to_channels
from regard.data.folder import (
    MANIFEST_SUFFIXES,
    PICTURE_SUFFIXES,
    FileSource,
    ZipSource,
    delimiter,
    is_parquet,
    list_folder,
    list_manifest,
    list_zip,
)
from regard.data.huggingface import hub_pictures, list_hub
from regard.data.inspection import read_quarantine
from regard.data.splits import Listing, assemble
from regard.data.streaming import list_stream, stream_pictures
from regard.errors import InputError, MissingExtraError


class DigitsSource(Source):
    """Pixel values 0..16 become round(v · 255 / 16), halves to even, as uint8."""

    has_files = False

    def __init__(self, values: np.ndarray, channels: int) -> None:
        super().__init__(channels)
        self.pictures = torch.from_numpy(np.round(values * (255 / 16)).astype(np.uint8))

    def name(self, item: int) -> str:
        return f"digits/{item:04d}"

    def raw(self, item: int) -> bytes:
        return self.pictures[item].numpy().tobytes()

    def stamp(self, item: int) -> str:
        return ""

    def read(self, item: int) -> Tensor:
        return to_channels(self.pictures[item].unsqueeze(0), self.channels)


def list_digits(channels: int | None) -> Listing:
    """The digits, one channel unless asked otherwise, classes "0" to "9"."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtraError("scikit-learn", "train", "the embedded digits") from None
    bunch = load_digits()
    count = len(bunch.target)
    return Listing(
        name="digits",
        source=DigitsSource(bunch.images, channels or 1),
        labels=[str(label) for label in bunch.target],
        splits=[""] * count,
        sizes=[64] * count,
    )


# Opening data: one word, a folder, a manifest or a Hugging Face data set.


def open_data(
    spec: str | Path,
    *,
    channels: int | None = None,
    seed: int = 0,
    val_fraction: float = 0.1,
    record: dict[str, Any] | None = None,
    quarantine: str | Path | None = None,
) -> Data:
    """Open `spec`.

    - "digits": scikit-learn's embedded digits.
    - a folder, or a zip, of train/ val/ [test/] with class folders, or of class folders alone.
    - a .csv, .tsv or .parquet manifest with columns path, label and, if wanted, split.
    - "hf:NAME_OR_PATH" ("hf:NAME:CONFIG"): a Hugging Face data set.
    - "stream:NAME_OR_PATH": the same in Parquet or tar shards, of which only what is in use lies
      on the disk.

    `channels` is 1 or 3; unless given, the digits have 1 and all else 3. Where the source has no
    val split, a stratified one of `val_fraction` is drawn, keyed by `seed`; `record`, an earlier
    `Data.record()`, brings back exactly the splits it was made from, or refuses changed data.
    `quarantine`, a list that `regard inspect` wrote for this data as it is now, is left out of the
    splits, which are otherwise the same as without it.
    """
    if channels is not None:
        check_channels(channels)
    listing = _list(str(spec), channels)
    data = assemble(listing, seed=seed, val_fraction=val_fraction, record=record)
    if quarantine is None:
        return data
    names = read_quarantine(quarantine, data)
    note = f"{len(names):,} pictures on the quarantine list {quarantine} are left out"
    return replace(data.without(names), notes=(*data.notes, note))


def _list(spec: str, channels: int | None) -> Listing:
    if not spec.strip():
        raise InputError("no DATA came; give a folder, `.` for the one you are in, or digits")
    path = Path(spec)
    if spec == "digits":
        return list_digits(channels)
    if spec.startswith("hf:"):
        return list_hub(spec.removeprefix("hf:"), channels)
    if spec.startswith("stream:"):
        return list_stream(spec.removeprefix("stream:"), channels)
    if path.is_dir():
        return list_folder(path, channels)
    if path.is_file() and path.suffix.lower() == ".zip":
        return list_zip(path, channels)
    if path.is_file() and path.suffix.lower() in MANIFEST_SUFFIXES:
        return list_manifest(path, channels)
    what = "is a file of another kind" if path.exists() else "does not exist"
    raise InputError(
        f"{spec!r} {what}; give digits, a folder or zip of class folders, a .csv, .tsv or "
        ".parquet manifest, hf:NAME_OR_PATH or stream:NAME_OR_PATH"
    )


# What `regard predict` is given, as one list of pictures without labels.


class Pictures(Source):
    """Several sources, one after another."""

    def __init__(self, parts: Sequence[tuple[Source, int]], channels: int) -> None:
        super().__init__(channels)
        self.sources = [source for source, _ in parts]
        self.ends = np.cumsum([count for _, count in parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def _locate(self, item: int) -> tuple[Source, int]:
        part = int(np.searchsorted(self.ends, item, side="right"))
        return self.sources[part], item - (int(self.ends[part - 1]) if part else 0)

    def name(self, item: int) -> str:
        source, place = self._locate(item)
        return source.name(place)

    def read(self, item: int) -> Tensor:
        source, place = self._locate(item)
        return source.read(place)


def open_pictures(inputs: Sequence[str], channels: int) -> Pictures:
    """The pictures that `inputs` name, in their order, each file once.

    An input is a picture file, a folder (searched at any depth), a glob pattern, a .csv, .tsv or
    .parquet manifest with a column path, a zip, "digits", "hf:NAME_OR_PATH" or
    "stream:NAME_OR_PATH". Refuses an input that does not exist or holds no picture; a listed file
    that cannot be read is found out later.
    """
    if not inputs:
        raise InputError("no images were given; name files, folders, globs, manifests or hf:NAME")
    parts: list[tuple[Source, int]] = []
    seen: set[str] = set()
    # neighbouring files make one source, however they were named
    for is_path, group in itertools.groupby(inputs, key=names_files):
        if is_path:
            found = (path for spec in group for path in paths_of(spec))
            paths = [path for path in found if not (path in seen or seen.add(path))]  # type: ignore[func-returns-value]
            if paths:
                parts.append((FileSource(Path(), paths, channels), len(paths)))
        else:
            parts += [open_other(spec, channels) for spec in group]
    if not parts:
        raise InputError(f"{', '.join(inputs)} hold no pictures; give at least one")
    return Pictures(parts, channels)


def names_files(spec: str) -> bool:
    """Whether an input leads to files on disk rather than into a container."""
    if spec == "digits" or spec.startswith(("hf:", "stream:")):
        return False
    return not (spec.lower().endswith(".zip") and os.path.isfile(spec))


def open_other(spec: str, channels: int) -> tuple[Source, int]:
    """A container of pictures, and how many it holds."""
    if spec == "digits":
        digits = list_digits(channels)
        return digits.source, len(digits.labels)
    if spec.startswith("hf:"):
        return hub_pictures(spec.removeprefix("hf:"), channels)
    if spec.startswith("stream:"):
        return stream_pictures(spec.removeprefix("stream:"), channels)
    try:
        with zipfile.ZipFile(spec) as archive:
            members = [m for m in archive.infolist() if is_picture(m.filename)]
    except (zipfile.BadZipFile, OSError) as error:
        raise InputError(f"{spec} is not a whole zip archive ({error})") from None
    if not members:
        raise no_pictures(spec)
    return ZipSource(Path(spec), members, channels), len(members)


def paths_of(spec: str) -> Iterator[str]:
    """The files that one input names."""
    if os.path.isdir(spec):
        yield from some(walk(spec), spec)
    elif os.path.isfile(spec):
        if spec.lower().endswith(MANIFEST_SUFFIXES):
            yield from some(listed_in(Path(spec)), spec)
        else:
            yield spec
    elif glob.has_magic(spec):
        matches = sorted(glob.glob(spec, recursive=True))
        yield from some((m for m in matches if is_picture(m) and os.path.isfile(m)), spec)
    else:
        raise InputError(f"{spec} does not exist; give a file, a folder, a glob or hf:NAME")


def walk(folder: str) -> Iterator[str]:
    """Picture files below a folder, links followed, hidden names left out."""
    above: set[tuple[int, int]] = set()
    for here, folders, files in os.walk(folder, followlinks=True):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in above:
            folders.clear()  # a link back to where we have been
            continue
        above.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(here, name) for name in sorted(files) if is_picture(name))


def is_picture(path: str) -> bool:
    """Whether a name says that it is a picture, and not a hidden one."""
    name = os.path.basename(path)
    return os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES and not name.startswith(".")


def listed_in(manifest: Path) -> Iterator[str]:
    """The column path of a manifest; paths are relative to its folder."""
    rows = parquet_paths(manifest) if is_parquet(manifest) else csv_paths(manifest)
    for number, path in enumerate(rows, start=1):
        if not path:
            raise InputError(f"{manifest} has no path in its picture {number}; fill it in")
        yield str(manifest.parent / path)


def csv_paths(manifest: Path) -> Iterator[str]:
    """The column path of a CSV or TSV file."""
    try:
        with open(manifest, newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file, delimiter=delimiter(manifest))
            check_column(manifest, list(rows.fieldnames or []))
            yield from ((row["path"] or "").strip() for row in rows)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{manifest} is not a CSV file in UTF-8 ({error}); save it so") from None


def parquet_paths(manifest: Path) -> Iterator[str]:
    """The column path of a Parquet file."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "train", "a Parquet manifest") from None
    try:
        with parquet.ParquetFile(manifest) as file:
            check_column(manifest, file.schema_arrow.names)
            for batch in file.iter_batches(columns=["path"]):
                yield from (path or "" for path in batch.column(0).to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{manifest} is not a whole Parquet file ({error})") from None


def check_column(manifest: Path, names: list[str]) -> None:
    """Refuse a manifest without the column path."""
    if "path" not in names:
        raise InputError(
            f"{manifest} has the columns {', '.join(names) or 'none'}; name one path (pictures "
            f"that lie in the file itself are given as hf:{manifest})"
        )


def some(paths: Iterator[str], spec: str) -> Iterator[str]:
    """The same, refused where there is none."""
    empty = True
    for path in paths:
        empty = False
        yield path
    if empty:
        raise no_pictures(spec)


def no_pictures(spec: str) -> InputError:
    """The refusal of an input without pictures."""
    return InputError(
        f"{spec} holds no pictures (files named .jpg, .png, .tif and the like); give another"
    )
