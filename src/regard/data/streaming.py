"""Files on a disk or behind a URL (fsspec's), which a network may fail to give for a while."""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import tarfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from regard._io import atomic_write, waiting, write_text
from regard.data.counter_rng import windowed
from regard.data.dataset import Source
from regard.data.folder import MOST_BYTES, PICTURE_SUFFIXES
from regard.data.huggingface import BUILDERS, columns_of, explained, picture_column
from regard.data.inspection import cache_folder
from regard.data.memory_cache import in_bytes
from regard.data.splits import ALIASES, Listing
from regard.errors import InputError, MissingExtraError, RegardError

_TRIES = 5


def patiently(read: Callable[[], Any], url: str) -> Any:
    """read(), again after a pause where a network fails; `RegardError` where it does not help."""
    for trial in range(_TRIES):
        try:
            return read()
        except RegardError:
            raise
        except Exception as error:  # file systems raise their own libraries' errors
            last = trial == _TRIES - 1 or not is_remote(url) or isinstance(error, FileNotFoundError)
            if last:
                raise RegardError(
                    f"{url} cannot be read ({type(error).__name__}: {error}); bring it back, and "
                    "the same command goes on"
                ) from error
            time.sleep(2.0**trial)
    raise AssertionError


def is_remote(url: str) -> bool:
    """Whether a shard lies behind a URL rather than on a disk."""
    return "://" in url and not url.startswith("file://")


def open_url(url: str) -> Any:
    """A shard open for reading, on a disk or behind a URL."""
    if not is_remote(url):
        return open(url.removeprefix("file://"), "rb")
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    return system.open(path, "rb")


def stamp_of(url: str) -> str:
    """Changes whenever the file does."""
    if not is_remote(url):
        status = os.stat(url.removeprefix("file://"))
        return f"{status.st_size}:{status.st_mtime_ns}"
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    return str(system.ukey(path))


# Blocks of pictures on the disk: fetched when first wanted, and no more than a budget holds.


_SUFFIX = ".block"
_LOCKS = 64
_ABANDONED = 3600.0  # seconds after which nobody writes on

# A picture's bytes, or the reason why there are none.
Row = bytes | str


class BlockCache:
    """A folder of blocks, shared by the processes of one machine, oldest out first.

    A block lies in a file: for each row its place and length, int64 (n, 2), then the bytes. A
    negative length -1 - m is that of a reason of m bytes.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder = folder
        self.budget = budget

    def row(self, key: str, row: int, fetch: Callable[[], Sequence[Row]]) -> Row:
        """Row `row` of the block `key`, which `fetch` gives where it is not on the disk."""
        path = self.folder / (hashlib.blake2b(key.encode(), digest_size=16).hexdigest() + _SUFFIX)
        while True:
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                return read_row(file.fileno(), row)
            try:
                self._keep(path, fetch)
            except OSError as error:
                raise RegardError(
                    f"{self.folder} cannot hold a block of pictures ({error.strerror or error}); "
                    "make room there, or set REGARD_CACHE to another folder, and go on"
                ) from error

    def used(self) -> int:
        """Bytes of all blocks on the disk."""
        return sum(status.st_size for _, status in self._blocks())

    def _keep(self, path: Path, fetch: Callable[[], Sequence[Row]]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = self.folder / f".lock-{int(path.stem[:8], 16) % _LOCKS:02d}"
        with waiting(lock):  # one process fetches, the others wait for it
            if path.exists():
                return
            rows = fetch()
            with atomic_write(path) as part:
                part.write_bytes(block_of(rows))
        with waiting(self.folder / ".lock"):
            self._make_room(path)

    def _make_room(self, newest: Path) -> None:
        blocks = sorted(self._blocks(), key=lambda entry: entry[1].st_mtime_ns)
        over = sum(status.st_size for _, status in blocks) - self.budget
        for path, status in blocks:
            if over <= 0:
                break
            if path != newest:
                path.unlink(missing_ok=True)  # who reads it now reads on
                over -= status.st_size
        for path in self.folder.glob(f".*{_SUFFIX}.*.part"):  # of processes that were killed
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _ABANDONED:
                    path.unlink()

    def _blocks(self) -> list[tuple[Path, os.stat_result]]:
        found = []
        for path in self.folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                found.append((path, path.stat()))
        return found


def block_of(rows: Sequence[Row]) -> bytes:
    """The file of a block."""
    bodies = [row.encode() if isinstance(row, str) else row for row in rows]
    table = np.empty((len(rows), 2), np.int64)
    place = table.nbytes
    for i, (row, body) in enumerate(zip(rows, bodies, strict=True)):
        table[i] = place, -1 - len(body) if isinstance(row, str) else len(body)
        place += len(body)
    return table.tobytes() + b"".join(bodies)


def read_row(handle: int, row: int) -> Row:
    """One row of an open block."""
    place, length = np.frombuffer(os.pread(handle, 16, 16 * row), np.int64).tolist()
    if length < 0:
        return os.pread(handle, -1 - length, place).decode()
    return os.pread(handle, length, place)


# Shards, read in place: Parquet files and tars of webdataset, on a disk or behind a URL.
#
# A shard is a file of blocks, and a block the rows that are read together: a row group of Parquet,
# or neighbours in a tar. A listing reads no pictures, so it is small beside the data.


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


# Data larger than the disk: Parquet and tar shards, local or on a hub, read a block at a time.
#
# What is read lies in a cache on the disk within a budget (see `blockcache`), the oldest blocks
# going first. An epoch's order mixes pictures within a window (see `counter_rng.windowed`), so few
# blocks are in use at a time, and stays a pure function of (seed, epoch): any step can be made
# first, by any number of workers and processes, with the same bits.


WINDOW = 16384
BUDGET = 16.0
_LISTED_AT_ONCE = 16


class StreamSource(Source):
    """Rows of shards, numbered through."""

    def __init__(
        self, shards: list[Shard], names: list[str], channels: int, cache: BlockCache
    ) -> None:
        super().__init__(channels)
        self.shards = shards
        self.names = names
        self.cache = cache
        self.window = WINDOW
        self.starts = block_starts(shards)
        # the first block of each shard, and the number of blocks
        self.firsts = np.concatenate([[0], np.cumsum([len(shard.counts) for shard in shards])])

    def blocks(self, items: np.ndarray) -> np.ndarray:
        """The number of the block that each item lies in, over all shards."""
        return np.searchsorted(self.starts, items, side="right") - 1

    def _locate(self, item: int) -> tuple[int, int, int, int]:
        """Shard, block in it, row in the shard, row in the block."""
        block = int(self.blocks(np.array(item)))
        shard = int(np.searchsorted(self.firsts, block, side="right")) - 1
        first = int(self.firsts[shard])
        start = int(self.starts[block])
        return shard, block - first, item - int(self.starts[first]), item - start

    def name(self, item: int) -> str:
        shard, _, row, _ = self._locate(item)
        return f"{self.names[shard]}/{row}"

    def raw(self, item: int) -> bytes:
        number, block, row, row_in_block = self._locate(item)
        shard = self.shards[number]
        if shard.spans is not None and not is_remote(shard.url):
            return bytes(patiently(lambda: shard.picture(row), shard.url))
        key = f"{shard.url}\0{shard.stamp}\0{shard.column}\0{block}"
        found = self.cache.row(key, row_in_block, lambda: shard.fetch(block))
        if isinstance(found, str):
            raise OSError(found)
        return found

    def stamp(self, item: int) -> str:
        return self.shards[self._locate(item)[0]].stamp

    def order(self, items: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        return windowed(self.blocks(items), self.window, seed, epoch)

    def sample(self, items: np.ndarray, count: int) -> np.ndarray:
        # whole blocks, drawn at random
        return np.sort(windowed(self.blocks(items), 0, 0, 0)[:count])

    def in_use(self) -> int:
        """About how many bytes of blocks are in use at a time, on the disk."""
        sizes = [
            size
            for shard in self.shards
            for size in shard.sizes
            if shard.spans is None or is_remote(shard.url)
        ]
        if not sizes:
            return 0
        share = min(1.0, self.window / max(1, int(self.starts[-1])))
        return int(sum(sizes) * share) + max(sizes)


def list_stream(name: str, channels: int | None) -> Listing:
    """List `stream:name`: a hub name, a folder of Parquet or tar shards, or one such file."""
    titled, source = _open(name, channels or 3, labelled=True)
    labels: list[str] = []
    splits: list[str] = []
    sizes: list[int] = []
    for (title, shard, classes), shown in zip(titled, source.names, strict=True):
        for row, value in enumerate(shard.labels):
            if value is None or (classes is not None and value < 0):
                raise InputError(f"{shown} has no label in row {row}; remove the row or label it")
            labels.append(classes[value] if classes is not None else str(value))
        splits += [ALIASES[title.lower()]] * len(shard.labels)
        for count, size in zip(shard.counts, shard.sizes, strict=True):
            sizes += [size] * count
    return Listing(
        name=f"stream:{name}",
        source=source,
        labels=labels,
        splits=splits,
        sizes=sizes,
        notes=(note(source),),
    )


def stream_pictures(name: str, channels: int) -> tuple[StreamSource, int]:
    """Every picture of `stream:name`, labelled or not, and how many there are."""
    _, source = _open(name, channels, labelled=False)
    return source, int(source.starts[-1])


def note(source: StreamSource) -> str:
    """What to tell people about a stream."""
    count = int(source.starts[-1])
    return (
        f"streamed: {count:,} pictures in {len(source.starts) - 1:,} blocks of "
        f"{len(source.shards):,} shards, mixed within {source.window:,} of each other; about "
        f"{in_bytes(source.in_use())} in use at a time, of a budget of "
        f"{in_bytes(source.cache.budget)} in {source.cache.folder}"
    )


def _open(
    name: str, channels: int, *, labelled: bool
) -> tuple[list[tuple[str, Shard, list[str] | None]], StreamSource]:
    """The shards with their splits and class names, and the source of them all."""
    files, features = _resolve(name)
    kind = os.path.splitext(files[0][1])[1]
    column, label, classes = "", None, None
    if kind == ".parquet":
        features = features or _stored_features(files[0][1])
        column = picture_column(f"stream:{name}", features)
        if labelled:
            column, label = columns_of(f"stream:{name}", features)
            classes = getattr(features[label], "names", None)
    cache = cache_folder() / "stream"

    def listed(url: str) -> Shard:
        def make(stamp: str) -> Shard:
            if kind == ".tar":
                return list_tar(url, stamp)
            return list_parquet(url, stamp, column, label)

        return remembered(cache, url, f"{column}\0{label}", make)

    with ThreadPoolExecutor(_LISTED_AT_ONCE) as pool:
        shards = list(pool.map(listed, [url for _, url in files]))
    budget = BlockCache(cache / "blocks", _budget())
    names = relative_names([url for _, url in files])
    bare = [replace(shard, labels=[]) for shard in shards]  # which go to every worker
    source = StreamSource(bare, names, channels, budget)
    if source.in_use() > budget.budget:
        raise InputError(
            f"stream:{name} has about {in_bytes(source.in_use())} in use at a time, more than the "
            f"budget of {in_bytes(budget.budget)}; set REGARD_STREAM_GB to more, or write the "
            "shards with smaller row groups"
        )
    titled = [(title, shard, classes) for (title, _), shard in zip(files, shards, strict=True)]
    return titled, source


def _budget() -> int:
    """The bytes that blocks may take on the disk: REGARD_STREAM_GB, in units of 10⁹."""
    said = os.environ.get("REGARD_STREAM_GB", str(BUDGET))
    try:
        value = float(said)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise InputError(f"REGARD_STREAM_GB is {said!r}; give a number of gigabytes above 0")
    return int(value * 1e9)


def _resolve(name: str) -> tuple[list[tuple[str, str]], Any]:
    """(split, url) of each shard, and the features where the data set's card states them."""
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("datasets", "hf", "streaming shards") from None
    path = Path(name)
    if path.is_file():
        if path.suffix not in KINDS:
            raise InputError(f"{name} is no {' or '.join(KINDS)} file; give one, or a folder")
        arguments: dict[str, Any] = {"path": BUILDERS[path.suffix], "data_files": str(path)}
    else:
        repository, _, config = name.partition(":") if not path.exists() else (name, "", "")
        arguments = {"path": repository, "name": config or None}
    try:
        builder = datasets.load_dataset_builder(**arguments)
    except Exception as error:  # the library raises its own, requests' and fsspec's errors
        raise explained(f"stream:{name}", error) from None
    found = builder.config.data_files or {}
    files = [
        (str(title), str(url))
        for title, urls in found.items()
        if str(title).lower() in ALIASES
        for url in urls
    ]
    kinds = sorted({os.path.splitext(url)[1] or "no ending" for _, url in files})
    if len(kinds) != 1 or kinds[0] not in KINDS:
        raise InputError(
            f"stream:{name} has {', '.join(kinds) or 'no'} files in its splits; Parquet or tar "
            "shards can be streamed: give those, or hf: to load all of it"
        )
    return files, builder.info.features


def _stored_features(url: str) -> Any:
    """The features that a Parquet file's own schema states."""
    import datasets

    held = patiently(lambda: footer(url, stamp_of(url)), url)
    return datasets.Features.from_arrow_schema(held.schema.to_arrow_schema())
