"""Shards, read in place: Parquet files and tars of webdataset, on a disk or behind a URL.

A shard is a file of blocks, and a block the rows that are read together: a row group of Parquet,
or neighbours in a tar. A listing reads no pictures, so it is small beside the data.
"""

import functools
import hashlib
import itertools
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regard.errors import InputError
from regard.files import write_text
from regard.images.blockcache import Row
from regard.images.folder import MOST_BYTES, PICTURE_SUFFIXES
from regard.images.remote import is_remote, open_url, patiently, stamp_of

KINDS = (".parquet", ".tar")
_TAR_BLOCK = 16 << 20  # bytes of neighbours in a tar that are read together
_LONGEST_NAME = 4096  # bytes of a class


@dataclass(frozen=True, eq=False)
class Shard:
    """A file of pictures: the rows and bytes of each block, and the label of each row.

    `labels` holds None for a row without one. `spans`, of a tar, are the place and the length of
    each picture; `column`, of Parquet, is that of the pictures.
    """

    url: str
    stamp: str
    counts: list[int]
    sizes: list[int]
    labels: list[Any]
    spans: list[tuple[int, int]] | None = None
    column: str = ""

    def fetch(self, block: int) -> Sequence[Row]:
        """The rows of a block: pictures, or reasons why there are none.

        Raises `RegardError` where the file cannot be reached, tried several times: a network
        that fails for a while must not change what is trained on.
        """
        read = functools.partial(self._parquet if self.spans is None else self._tar, block)
        return patiently(read, self.url)

    def picture(self, row: int) -> bytes:
        """A picture of a tar, read in place."""
        assert self.spans is not None
        place, length = self.spans[row]
        with open_url(self.url) as file:
            file.seek(place)
            return file.read(length)

    def _tar(self, block: int) -> list[Row]:
        assert self.spans is not None
        first = sum(self.counts[:block])
        spans = self.spans[first : first + self.counts[block]]
        begin = spans[0][0]
        with open_url(self.url) as file:
            file.seek(begin)
            run = file.read(sum(spans[-1]) - begin)
        return [run[place - begin : place - begin + length] for place, length in spans]

    def _parquet(self, block: int) -> list[Row]:
        import pyarrow
        from pyarrow import parquet

        with open_url(self.url) as file:
            try:
                opened = parquet.ParquetFile(file, metadata=footer(self.url, self.stamp))
                stored = opened.read_row_group(block, columns=[self.column]).column(0).to_pylist()
            except (pyarrow.ArrowException, OSError) as error:
                if is_remote(self.url) and isinstance(error, OSError):
                    raise
                return [f"the shard is damaged ({error})"] * self.counts[block]
        return [as_row(value) for value in stored]


def as_row(value: Any) -> Row:
    """What an Image column stores of a picture: {"bytes", "path"}, or the bytes."""
    raw = value.get("bytes") if isinstance(value, dict) else value
    return "the row holds no picture" if raw is None else raw


def list_parquet(url: str, stamp: str, column: str, label: str | None) -> Shard:
    """List a Parquet file, of which only the footer and the labels are read."""
    import pyarrow
    from pyarrow import parquet

    held = footer(url, stamp)
    groups = [held.row_group(g) for g in range(held.num_row_groups)]
    labels: list[Any] = [None] * held.num_rows
    if label is not None:
        try:
            with open_url(url) as file:
                stored = parquet.read_table(file, columns=[label]).column(0).to_pylist()
        except (pyarrow.ArrowException, KeyError) as error:
            raise InputError(f"{url} has no readable column {label} ({error})") from None
        labels = [v if isinstance(v, int | None) else str(v) for v in stored]
    return Shard(
        url=url,
        stamp=stamp,
        counts=[group.num_rows for group in groups],
        sizes=[group.total_byte_size for group in groups],
        labels=labels,
        column=column,
    )


def list_tar(url: str, stamp: str) -> Shard:
    """List a tar of webdataset: neighbours of one name, of which one is a picture, one the class.

    The class is in NAME.cls or NAME.label; a name ends at the first dot after the last slash.
    """
    labels, spans = [], []
    try:
        with open_url(url) as file, tarfile.open(fileobj=file) as tar:
            for name, members in itertools.groupby(tar, key=lambda m: split_name(m.name)[0]):
                ends = {split_name(member.name)[1]: member for member in members if member.isfile()}
                pictures = [
                    end for end in ends if os.path.splitext("x." + end)[1] in PICTURE_SUFFIXES
                ]
                if not pictures or os.path.basename(name).startswith("."):
                    continue
                if len(pictures) > 1:
                    raise InputError(
                        f"{url} has several pictures for {name} ({', '.join(pictures)}); keep one"
                    )
                member = ends[pictures[0]]
                if member.size > MOST_BYTES:
                    raise InputError(
                        f"{member.name} in {url} has {member.size:,} bytes, over the limit of "
                        f"{MOST_BYTES:,}; leave it out"
                    )
                spans.append((member.offset_data, member.size))
                said = ends.get("cls") or ends.get("label")
                body = tar.extractfile(said) if said is not None else None
                labels.append(None if body is None else class_name(body.read(_LONGEST_NAME)))
    except (tarfile.TarError, EOFError) as error:
        raise InputError(f"{url} is not a whole tar file ({error})") from None
    counts, sizes = runs_of(spans)
    return Shard(url, stamp, counts, sizes, labels, spans)


def split_name(path: str) -> tuple[str, str]:
    """NAME and ENDING, in small letters, of a member: "a/b.seg.png" has the ending "seg.png"."""
    folder, _, last = path.rpartition("/")
    name, _, ending = last.partition(".")
    return f"{folder}/{name}", ending.lower()


def class_name(body: bytes) -> str:
    """The class that a member's text names; numbers as numbers are written."""
    text = body.decode("utf-8", "backslashreplace").strip()
    return str(int(text)) if text.isascii() and text.isdigit() else text


def runs_of(spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Rows and bytes of each run of neighbours."""
    counts: list[int] = []
    sizes: list[int] = []
    begin = 0
    for place, length in spans:
        if not counts or place + length - begin > _TAR_BLOCK:
            begin = place
            counts.append(0)
            sizes.append(0)
        counts[-1] += 1
        sizes[-1] = place + length - begin
    return counts, sizes


def remembered(cache: Path, url: str, how: str, make: Callable[[str], Shard]) -> Shard:
    """`make(stamp)`, or what it gave for this file, as it is now, before."""
    stamp = patiently(functools.partial(stamp_of, url), url)
    name = hashlib.blake2b(f"{url}\0{stamp}\0{how}".encode(), digest_size=16).hexdigest()
    path = cache / f"listing-{name}.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        spans = stored["spans"] and [tuple(span) for span in stored["spans"]]
        return Shard(**{**stored, "spans": spans})
    except (OSError, ValueError, KeyError, TypeError):
        shard = patiently(functools.partial(make, stamp), url)
        cache.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(shard.__dict__))
        return shard


@functools.lru_cache(maxsize=256)
def footer(url: str, stamp: str) -> Any:
    """The metadata of a Parquet file that has this stamp."""
    import pyarrow
    from pyarrow import parquet

    try:
        with open_url(url) as file:
            return parquet.read_metadata(file)
    except pyarrow.ArrowException as error:
        raise InputError(f"{url} is not a whole Parquet file ({error})") from None


def relative_names(urls: Sequence[str]) -> list[str]:
    """The urls without the folders that all begin with: names for people."""
    parts = [url.split("/") for url in urls]
    levels = zip(*(folders[:-1] for folders in parts), strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda level: len(set(level)) == 1, levels))
    return ["/".join(folders[shared:]) for folders in parts]


def block_starts(shards: Sequence[Shard]) -> np.ndarray:
    """The item at which each block begins, and the number of items: int64 (blocks + 1,)."""
    counts = [count for shard in shards for count in shard.counts]
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
