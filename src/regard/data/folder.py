"""Class folders: train/ val/ [test/] of them, or class folders alone; on disk or in a zip."""

import csv
import os
import stat
import threading
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regard.data.dataset import Source, readable_path
from regard.data.splits import ALIASES, Listing
from regard.errors import InputError, MissingExtraError

# Ends of names that say "this is a picture". HEIC stands here to be reported as unreadable, not
# passed over.
PICTURE_SUFFIXES = frozenset(
    "." + end
    for end in (
        *("jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "bmp", "dib", "gif", "tif", "tiff"),
        *("pgm", "ppm", "pbm", "pnm", "jp2", "j2k", "jpx", "avif", "avifs", "tga", "sgi", "ico"),
        *("dds", "pcx", "heic", "heif"),
    )
)


# A file with more is not read: what decodes to as many pixels as are allowed is smaller.
MOST_BYTES = 2 << 30


def read_file(path: str | Path) -> bytes:
    """A file's bytes; `OSError` for pipes and devices, which may never end, and for the huge."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise OSError("it is a pipe or a device, not a file")
    _check_bytes(status.st_size)
    with open(path, "rb") as file:
        return file.read()


def _check_bytes(size: int) -> None:
    if size > MOST_BYTES:
        raise OSError(f"its {size:,} bytes are over the limit of {MOST_BYTES:,}")


class FileSource(Source):
    """Files on disk. `paths` are relative to `root`, or absolute."""

    def __init__(self, root: Path, paths: list[str], channels: int) -> None:
        super().__init__(channels)
        self.root = root
        self.paths = paths

    def name(self, item: int) -> str:
        return readable_path(self.paths[item])

    def raw(self, item: int) -> bytes:
        return read_file(self.root / self.paths[item])

    def stamp(self, item: int) -> str:
        status = os.stat(self.root / self.paths[item])
        return f"{status.st_size}:{status.st_mtime_ns}"


class ZipSource(Source):
    """Members of a zip archive, read in place; each process opens it once."""

    def __init__(self, archive: Path, members: list[zipfile.ZipInfo], channels: int) -> None:
        super().__init__(channels)
        self.archive = archive
        self.members = members
        self._opened: zipfile.ZipFile | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"channels": self.channels, "archive": self.archive, "members": self.members}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["archive"], state["members"], state["channels"])  # type: ignore[misc]

    def name(self, item: int) -> str:
        return self.members[item].filename

    def raw(self, item: int) -> bytes:
        with self._lock:
            if self._opened is None:
                self._opened = zipfile.ZipFile(self.archive)
        _check_bytes(self.members[item].file_size)
        try:
            return self._opened.read(self.members[item])
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
            raise OSError(str(error)) from None

    def stamp(self, item: int) -> str:
        return f"{self.members[item].file_size}:{self.members[item].CRC}"


def list_folder(root: Path, channels: int | None) -> Listing:
    """List a folder; links are followed, and one that leads back into itself is refused."""
    found = sorted(_walk(root), key=lambda entry: entry[0])
    paths = [path for path, _ in found]
    kept, labels, splits, notes = _label(str(root), paths)
    return Listing(
        name=readable_path(root),
        source=FileSource(root.absolute(), [paths[i] for i in kept], channels or 3),
        labels=labels,
        splits=splits,
        sizes=[found[i][1] for i in kept],
        notes=notes,
    )


def list_zip(archive: Path, channels: int | None) -> Listing:
    """List a zip archive of class folders, without unpacking it."""
    try:
        with zipfile.ZipFile(archive) as opened:
            members = sorted(opened.infolist(), key=lambda member: member.filename)
    except (zipfile.BadZipFile, OSError) as error:
        raise InputError(f"{archive} is not a whole zip archive ({error})") from None
    members = [member for member in members if not member.is_dir()]
    strip = _common_folder([member.filename for member in members])
    kept, labels, splits, notes = _label(
        str(archive), [member.filename[len(strip) :] for member in members]
    )
    return Listing(
        name=readable_path(archive),
        source=ZipSource(archive.absolute(), [members[i] for i in kept], channels or 3),
        labels=labels,
        splits=splits,
        sizes=[members[i].CRC for i in kept],
        notes=notes,
    )


def _common_folder(names: list[str]) -> str:
    """The one folder that wraps an archive ("cats-and-dogs/"), unless it is a split itself."""
    names = [name for name in names if not _hidden(name)]
    top = {name.partition("/")[0] for name in names}
    if len(top) != 1 or any(name.count("/") < 2 for name in names) or top & set(ALIASES):
        return ""
    return top.pop() + "/"


def _hidden(path: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in path.split("/"))


def _walk(root: Path) -> Iterator[tuple[str, int]]:
    """Relative path (with /) and size of every file below `root`."""

    def descend(folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, int]]:
        try:
            status = os.stat(root / folder)
            entries = sorted(os.scandir(root / folder), key=lambda entry: entry.name)
        except OSError as error:
            raise InputError(
                f"the folder {readable_path(root / folder)} cannot be listed "
                f"({error.strerror}); make it readable or remove it"
            ) from None
        here = (status.st_dev, status.st_ino)
        if here in above:
            raise InputError(
                f"{readable_path(root / folder)} is a link that leads back into a folder it lies "
                "in; remove the link"
            )
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if _hidden(entry.name):
                continue
            try:
                is_folder = entry.is_dir()
            except OSError as error:
                raise InputError(
                    f"{readable_path(root / path)} cannot be followed ({error.strerror}); "
                    "remove the link"
                ) from None
            if is_folder:
                yield from descend(path, (*above, here))
            else:
                yield path, _size(root / path)

    yield from descend("", ())


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1  # a broken link: listed, and found unreadable when it is read


def _label(name: str, paths: list[str]) -> tuple[list[int], list[str], list[str], tuple[str, ...]]:
    """Which paths are labelled pictures, and their classes and splits by name."""
    tops = {path.split("/")[0] for path in paths if "/" in path and not _hidden(path)}
    split_folders = {top for top in tops if top.lower() in ALIASES}
    has_splits = any(ALIASES[top.lower()] == "train" for top in split_folders)
    strange = sorted(tops - split_folders)
    if has_splits and strange:
        raise InputError(
            f"{name} has split folders ({', '.join(sorted(split_folders))}) beside other folders "
            f"({', '.join(strange[:5])}); keep either splits or class folders at the top"
        )
    if has_splits and len({ALIASES[top.lower()] for top in split_folders}) < len(split_folders):
        raise InputError(
            f"{name} has two folders for one split among {', '.join(sorted(split_folders))}; "
            "keep one"
        )
    depth = 2 if has_splits else 1
    kept, labels, splits, other, loose = [], [], [], Counter[str](), 0
    for i, path in enumerate(paths):
        if _hidden(path):
            continue
        suffix = os.path.splitext(path)[1].lower()
        parts = path.split("/")
        if suffix not in PICTURE_SUFFIXES:
            other[suffix or "no suffix"] += 1
        elif len(parts) <= depth:
            loose += 1
        else:
            kept.append(i)
            labels.append(readable_path(parts[depth - 1]))
            splits.append(ALIASES[parts[0].lower()] if has_splits else "")
    if loose and not kept:
        raise InputError(
            f"{name} has {loose} pictures but no class folders; put each class in a folder of its "
            "own, or list path and label in a CSV file"
        )
    notes = []
    if other:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in other.most_common(5))
        notes.append(f"files not read as pictures, by their names: {kinds}")
    if loose:
        notes.append(f"{loose} pictures lie outside the class folders and have no label: not used")
    return kept, labels, splits, tuple(notes)


# Manifests: a CSV, TSV or Parquet file with a row for each picture.


MANIFEST_SUFFIXES = (".csv", ".tsv", ".parquet")
_COLUMNS = ("path", "label", "split")

# (row number as an editor shows it, path, label, split)
Row = tuple[int, str, str, str]


def list_manifest(path: Path, channels: int | None) -> Listing:
    """List a manifest with columns path, label and, if wanted, split.

    Paths are absolute or relative to the manifest's folder. Raises `InputError` for other
    columns, empty values, unknown splits, a path that is listed twice, and when no listed file
    exists; a file that is missing among others is listed, and found unreadable when read.
    """
    notes: list[str] = []
    rows = list(_rows(path, notes))
    splits = [_split(path, row) for row in rows]
    if any(splits) and not all(splits):
        number = rows[splits.index("")][0]
        raise InputError(f"{path}, row {number} has no split though others have; fill the column")
    seen: dict[str, int] = {}
    for number, picture, label, _ in rows:
        if not picture or not label:
            what = "path" if not picture else "label"
            raise InputError(f"{path}, row {number} has no {what}; fill it in or remove the row")
        if "\0" in picture:
            raise InputError(f"{path}, row {number} has the path {picture!r}, which no file has")
        if picture in seen:
            raise InputError(
                f"{path} lists {picture!r} twice, in rows {seen[picture]} and {number}; keep one"
            )
        seen[picture] = number
    root = path.parent.absolute()
    sizes = [_listed_size(root / picture) for picture in seen]
    if sizes and max(sizes) < 0:
        raise InputError(
            f"no file that {path} lists exists; the first of {len(sizes)} is "
            f"{root / rows[0][1]}; paths are relative to the manifest's folder"
        )
    return Listing(
        name=readable_path(path),
        source=FileSource(root, list(seen), channels or 3),
        labels=[row[2] for row in rows],
        splits=splits,
        sizes=sizes,
        notes=tuple(notes),
    )


def _listed_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _split(path: Path, row: Row) -> str:
    number, _, _, split = row
    if split and split.lower() not in ALIASES:
        raise InputError(f"{path}, row {number} has the split {split!r}; use train, val or test")
    return ALIASES[split.lower()] if split else ""


def is_parquet(manifest: Path) -> bool:
    """Whether a manifest is a Parquet file, by its ending; else it is text."""
    return manifest.suffix.lower() == ".parquet"


def delimiter(manifest: Path) -> str:
    """What stands between the columns of a text manifest."""
    return "\t" if manifest.suffix.lower() == ".tsv" else ","


def _rows(path: Path, notes: list[str]) -> Iterator[Row]:
    return _parquet_rows(path, notes) if is_parquet(path) else _csv_rows(path, notes)


def _csv_rows(path: Path, notes: list[str]) -> Iterator[Row]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, delimiter=delimiter(path))
            _check_columns(path, list(reader.fieldnames or []), notes)
            for row in reader:
                if None in row:
                    raise InputError(
                        f"{path}, row {reader.line_num} has more fields than the header; put a "
                        "label that holds the separator in quotes"
                    )
                values = [(row.get(column) or "").strip() for column in _COLUMNS]
                yield (reader.line_num, values[0], values[1], values[2])
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not a CSV file in UTF-8 ({error}); save it as such") from None


def _parquet_rows(path: Path, notes: list[str]) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "train", "a Parquet manifest") from None
    try:
        names = parquet.read_schema(path).names
        if "path" not in names and "label" in names:
            raise InputError(
                f"{path} has no column path; if it holds the pictures themselves, give hf:{path}"
            )
        _check_columns(path, names, notes)
        table = parquet.read_table(path, columns=[c for c in _COLUMNS if c in names])
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path} is not a whole Parquet file ({error})") from None
    for number, row in enumerate(table.to_pylist(), start=1):
        path_, label, split = ("" if row.get(c) is None else str(row[c]) for c in _COLUMNS)
        yield (number, path_, label, split)


def _check_columns(path: Path, names: list[str], notes: list[str]) -> None:
    twice = [column for column in _COLUMNS if names.count(column) > 1]
    if twice:
        raise InputError(f"{path} has the column {twice[0]} more than once; keep one of them")
    missing = [column for column in ("path", "label") if column not in names]
    if missing:
        raise InputError(
            f"{path} has the columns {', '.join(names) or 'none'} "
            f"but no {' and no '.join(missing)}; "
            "name the columns path, label and, if wanted, split"
        )
    unused = [name for name in names if name not in _COLUMNS]
    if unused:
        notes.append(f"columns of the manifest that are not used: {', '.join(unused)}")
