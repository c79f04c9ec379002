"""Manifests: a CSV, TSV or Parquet file with a row for each picture."""

import csv
from collections.abc import Iterator
from pathlib import Path

from regard.errors import InputError, MissingExtraError
from regard.images.data import readable_path
from regard.images.folder import FileSource
from regard.images.splits import ALIASES, Listing

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
    sizes = [_size(root / picture) for picture in seen]
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


def _size(path: Path) -> int:
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
