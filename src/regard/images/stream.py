"""Data larger than the disk: Parquet and tar shards, local or on a hub, read a block at a time.

What is read lies in a cache on the disk within a budget (see `blockcache`), the oldest blocks
going first. An epoch's order mixes pictures within a window (see `keys.windowed`), so few blocks
are in use at a time, and stays a pure function of (seed, epoch): any step can be made first, by any
number of workers and processes, with the same bits.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from regard.errors import InputError, MissingExtraError
from regard.images.blockcache import BlockCache
from regard.images.data import Source
from regard.images.hub import BUILDERS, columns_of, explained, picture_column
from regard.images.keys import windowed
from regard.images.memory import in_bytes
from regard.images.remote import is_remote, patiently, stamp_of
from regard.images.scan import cache_folder
from regard.images.shards import (
    KINDS,
    Shard,
    block_starts,
    footer,
    list_parquet,
    list_tar,
    relative_names,
    remembered,
)
from regard.images.splits import ALIASES, Listing

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
