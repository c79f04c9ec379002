"""Pictures decoded once and kept in memory, as many as a budget holds."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.batches import deliver
from regard.data.dataset import Data, Source
from regard.data.decode import UnreadableImage
from regard.errors import InputError

_CHUNK = 64 << 20  # bytes that are allocated, and shared with workers, at a time
_TASK = 256  # pictures decoded by a worker at a time


class MemorySource(Source):
    """A source whose first pictures are held decoded, uint8 (h, w, c), in a few large chunks."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.channels)
        self.source = source
        self.has_files = source.has_files
        self.chunks: list[Tensor] = []
        self.used = 0
        # item -> (chunk, offset, h, w)
        self.held: dict[int, tuple[int, int, int, int]] = {}
        self._free = 0

    def name(self, item: int) -> str:
        return self.source.name(item)

    def raw(self, item: int) -> bytes:
        return self.source.raw(item)

    def stamp(self, item: int) -> str:
        return self.source.stamp(item)

    def read(self, item: int) -> Tensor:
        place = self.held.get(item)
        if place is None:
            return self.source.read(item)
        chunk, offset, h, w = place
        pixels = self.chunks[chunk][offset : offset + h * w * self.channels]
        return pixels.view(h, w, self.channels).permute(2, 0, 1)

    def together(self, items: np.ndarray) -> Tensor | None:
        """Pictures of one size as uint8 (b, c, h, w), or None where they are not all held."""
        places = [self.held.get(item) for item in items.tolist()]
        sizes = {place and place[2:] for place in places}
        if len(sizes) != 1 or None in sizes:
            return None
        pictures = [self.read(item) for item in items.tolist()]
        return torch.stack(pictures)

    def hold(self, item: int, picture: Tensor) -> None:
        """Keep a picture; c h w -> h w c."""
        _, h, w = picture.shape
        count = picture.numel()
        if count > self._free:
            self.chunks.append(torch.empty(max(count, _CHUNK), dtype=torch.uint8))
            self._free = len(self.chunks[-1])
        chunk = self.chunks[-1]
        offset = len(chunk) - self._free
        chunk[offset : offset + count] = picture.permute(1, 2, 0).reshape(-1)
        self.held[item] = (len(self.chunks) - 1, offset, h, w)
        self._free -= count
        self.used += count

    def __getstate__(self) -> dict[str, Any]:
        # Pickling for a worker moves the chunks to shared memory.
        needed = sum(len(chunk) for chunk in self.chunks if not chunk.is_shared())
        try:
            free = shutil.disk_usage("/dev/shm").free
        except OSError:  # another way of sharing, without that limit
            free = needed
        if needed > free:
            raise InputError(
                f"sharing {in_bytes(needed)} of pictures with workers needs more than the "
                f"{in_bytes(free)} free in /dev/shm; enlarge it, lower the memory budget, or use "
                "no workers"
            )
        return self.__dict__


class _Reader:
    """Reads a run of a source's pictures; None stands for one that is unreadable."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __call__(self, items: list[int]) -> list[Tensor | None]:
        return [self._read(item) for item in items]

    def _read(self, item: int) -> Tensor | None:
        try:
            return self.source.read(item)
        except UnreadableImage:
            return None


def remember(
    data: Data,
    budget: int = 2 << 30,
    *,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Data:
    """The same data with pictures decoded into memory, training first, up to `budget` bytes.

    A note says how many are held. Those beyond the budget are read and decoded when asked for,
    and unreadable ones fail when asked for: nothing but speed changes. `progress(done, of)` is
    called as it goes. Streamed data stay as they are: decoding their beginning ahead would read
    blocks long before they are wanted.
    """
    if budget < 0:
        raise InputError(f"the memory budget is {budget}; give bytes, 0 for none")
    source = next(iter(data.splits.values())).source
    if source.streamed:
        return replace(data, notes=(*data.notes, "streamed pictures are not kept in memory"))
    order = np.concatenate([split.items for split in data.splits.values()]).tolist()
    memory = MemorySource(source)
    done = 0
    tasks = ((order[i : i + _TASK],) for i in range(0, len(order), _TASK))
    # without a budget there is nothing to decode
    for pictures in deliver(_Reader(source), tasks, workers) if budget else ():
        for item, picture in zip(order[done : done + _TASK], pictures, strict=True):
            if picture is not None and memory.used + picture.numel() <= budget:
                memory.hold(item, picture)
        done += len(pictures)
        if progress is not None:
            progress(done, len(order))
        if memory.used + _largest(pictures) > budget:
            break
    note = (
        f"{len(memory.held):,} of {len(order):,} pictures are kept decoded in memory, "
        f"{in_bytes(memory.used)} of a budget of {in_bytes(budget)}"
    )
    splits = {title: split.over(memory) for title, split in data.splits.items()}
    return replace(data, splits=splits, notes=(*data.notes, note))


def _largest(pictures: list[Tensor | None]) -> int:
    return max((picture.numel() for picture in pictures if picture is not None), default=0)


def in_bytes(count: int) -> str:
    """A number of bytes for people: 138 MB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
