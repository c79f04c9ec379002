"""What `regard predict` is given, as one list of pictures without labels."""

import csv
import glob
import itertools
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from regard.errors import InputError, MissingExtraError
from regard.images.data import Source
from regard.images.digits import list_digits
from regard.images.folder import PICTURE_SUFFIXES, FileSource, ZipSource
from regard.images.hub import hub_pictures
from regard.images.manifest import MANIFEST_SUFFIXES, delimiter, is_parquet
from regard.images.stream import stream_pictures


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
