"""Rows of predictions, and the three formats they are written in."""

import csv
import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from regard._io import atomic_write
from regard.errors import InputError, MissingExtraError, nearest

# A spreadsheet takes a cell that begins so for a formula, or a leading apostrophe for its sign.
HOSTILE = ("=", "+", "-", "@", "\t", "\r", "\n", "'")

Row = dict[str, Any]


@dataclass(frozen=True)
class Columns:
    """path; class, probability, class_2, probability_2, … of the most probable; error; embedding.

    A picture that could not be read has only path and error.
    """

    top: int
    embed: bool

    def classes(self) -> list[tuple[str, str]]:
        """The names of the pairs of columns, best first."""
        ends = ["", *(f"_{place}" for place in range(2, self.top + 1))]
        return [(f"class{end}", f"probability{end}") for end in ends]

    def names(self) -> list[str]:
        """All columns in order."""
        pairs = [name for pair in self.classes() for name in pair]
        return ["path", *pairs, "error", *(["embedding"] if self.embed else [])]

    def read(self, path: str, best: Sequence[tuple[str, float]], embedding: Any = None) -> Row:
        """The row of a picture: `best` has `top` pairs."""
        row: Row = {"path": path}
        for (name, probability), (label, value) in zip(self.classes(), best, strict=True):
            row[name], row[probability] = label, value
        if self.embed:
            row["embedding"] = embedding
        return row


class Format(Protocol):
    """How rows become a file: parts first, then one of them all."""

    def write(self, rows: Sequence[Row], path: Path, columns: Columns) -> None:
        """Write a part."""
        ...

    def join(self, parts: Sequence[Path], out: Path, columns: Columns) -> None:
        """Write `out` from the parts, holding no more than one in memory."""
        ...


class CSV:
    """UTF-8, a header, one line a row; cells that a spreadsheet would run get an apostrophe."""

    def write(self, rows: Sequence[Row], path: Path, columns: Columns) -> None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for row in rows:
            writer.writerow([cell(row.get(name)) for name in columns.names()])
        path.write_text(text.getvalue(), encoding="utf-8")

    def join(self, parts: Sequence[Path], out: Path, columns: Columns) -> None:
        with open(out, "wb") as file:
            file.write((",".join(columns.names()) + "\n").encode())
            append(parts, file)


class JSONLines:
    """One JSON object a line; what a row lacks is null."""

    def write(self, rows: Sequence[Row], path: Path, columns: Columns) -> None:
        lines = []
        for row in rows:
            plain = {name: as_json(row.get(name)) for name in columns.names()}
            lines.append(json.dumps(plain, ensure_ascii=False) + "\n")
        path.write_text("".join(lines), encoding="utf-8")

    def join(self, parts: Sequence[Path], out: Path, columns: Columns) -> None:
        with open(out, "wb") as file:
            append(parts, file)


class Parquet:
    """Strings, float32 probabilities and lists of float32; a row group for each part."""

    def write(self, rows: Sequence[Row], path: Path, columns: Columns) -> None:
        arrow, parquet = pyarrow()
        named = {name: [row.get(name) for row in rows] for name in columns.names()}
        parquet.write_table(arrow.table(named, schema=self.schema(columns)), path)

    def join(self, parts: Sequence[Path], out: Path, columns: Columns) -> None:
        _, parquet = pyarrow()
        with parquet.ParquetWriter(out, self.schema(columns)) as writer:
            for part in parts:
                writer.write_table(parquet.read_table(part, memory_map=False))

    def schema(self, columns: Columns) -> Any:
        """The types of the columns."""
        arrow, _ = pyarrow()
        kinds = {"path": arrow.string(), "error": arrow.string()}
        kinds["embedding"] = arrow.list_(arrow.float32())
        for name, probability in columns.classes():
            kinds |= {name: arrow.string(), probability: arrow.float32()}
        return arrow.schema([(name, kinds[name]) for name in columns.names()])


FORMATS: dict[str, Format] = {".csv": CSV(), ".jsonl": JSONLines(), ".parquet": Parquet()}


def format_of(out: Path) -> Format:
    """The format that a file's ending names, ready to write."""
    if out.suffix not in FORMATS:
        raise InputError(
            f"{out} has the ending {out.suffix!r}; {nearest(out.suffix, FORMATS)}: the ending "
            "chooses the format"
        )
    if out.suffix == ".parquet":
        pyarrow()
    return FORMATS[out.suffix]


def join(parts: Sequence[Path], out: Path, columns: Columns) -> None:
    """Make `out` of its parts in one step."""
    with atomic_write(out) as whole:
        format_of(out).join(parts, whole, columns)


def append(parts: Sequence[Path], file: Any) -> None:
    """Copy the parts to the end of an open file."""
    for part in parts:
        with open(part, "rb") as source:
            shutil.copyfileobj(source, file)


def cell(value: Any) -> str:
    """A value as CSV holds it."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6f}"
    if isinstance(value, str):
        return "'" + value if value.startswith(HOSTILE) else value
    return json.dumps(as_json(value))


def as_json(value: Any) -> Any:
    """A value as JSON holds it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float):
        return round(value, 6)
    return [float(f"{number:.7g}") for number in value]


def pyarrow() -> tuple[Any, Any]:
    """pyarrow and its Parquet part, or which extra to install."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "train", "writing Parquet") from None
    return pyarrow, parquet
