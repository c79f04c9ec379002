"""What every source becomes: classes, and splits of labelled pictures."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from regard.data.counter_rng import permutation
from regard.data.decode import UnreadableImage, decode
from regard.errors import InputError


class Source:
    """Where pictures come from; item numbers run over all of them, before any split.

    `has_files` says whether `raw` gives picture files; if not, it gives pixels. `window` is above
    0 for data that are streamed: see `streamed`.
    """

    has_files = True
    window = 0

    def __init__(self, channels: int) -> None:
        self.channels = channels

    @property
    def streamed(self) -> bool:
        """Whether pictures may lie far away and be more than this machine holds.

        Then an epoch's order mixes those within `window` of each other, and looking at all of
        them, or at some spread evenly, is dear.
        """
        return self.window > 0

    def name(self, item: int) -> str:
        """The path or id shown to people."""
        raise NotImplementedError

    def raw(self, item: int) -> bytes:
        """The stored bytes; raises `OSError` where they cannot be had."""
        raise NotImplementedError

    def stamp(self, item: int) -> str:
        """Changes whenever the bytes do; cheap, as a file's size and time of change."""
        raise NotImplementedError

    def read(self, item: int) -> Tensor:
        """The picture, uint8 (c, h, w); raises `UnreadableImage`."""
        try:
            raw = self.raw(item)
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            raise UnreadableImage(self.name(item), reason) from None
        return decode(raw, self.channels, self.name(item))

    def together(self, items: np.ndarray) -> Tensor | None:
        """Pictures of one size at once, uint8 (b, c, h, w), if that is quicker than one by one."""
        return None

    def blocks(self, items: np.ndarray) -> np.ndarray:
        """The block that each item lies in, of those that are read together; its own number, but
        for streamed data."""
        return items

    def order(self, items: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """The order in which an epoch goes through `items`: a permutation of their positions."""
        return permutation(len(items), seed, epoch)

    def sample(self, items: np.ndarray, count: int) -> np.ndarray:
        """Positions of up to `count` of `items`, ascending, that stand for all."""
        return np.unique(np.linspace(0, len(items) - 1, min(count, len(items))).astype(int))


def readable(split: "Split", positions: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
    """(position, picture) for each of these positions of a split whose picture can be read."""
    for position in positions:
        try:
            picture = split.read(position)
        except UnreadableImage:
            continue
        yield position, picture


class Split:
    """Labelled pictures: positions 0 … len - 1 into a source; labels 0 … num_classes - 1."""

    def __init__(
        self, source: Source, items: np.ndarray, labels: np.ndarray, num_classes: int
    ) -> None:
        self.source = source
        self.items = np.asarray(items, np.int64)
        self.labels = np.asarray(labels, np.int64)
        self.num_classes = num_classes

    def __len__(self) -> int:
        return len(self.items)

    def name(self, i: int) -> str:
        """The path or id of picture i."""
        return self.source.name(int(self.items[i]))

    def read(self, i: int) -> Tensor:
        """Picture i, uint8 (c, h, w); raises `UnreadableImage`."""
        return self.source.read(int(self.items[i]))

    def together(self, positions: np.ndarray) -> Tensor | None:
        """Pictures of one size at once, uint8 (b, c, h, w), where they are in memory."""
        return self.source.together(self.items[positions])

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The positions in the order of one epoch, int64: a pure function of (seed, epoch)."""
        return self.source.order(self.items, seed, epoch)

    def sample(self, count: int) -> np.ndarray:
        """Up to `count` positions, ascending, that stand for all and are cheap to read."""
        return self.source.sample(self.items, count)

    def over(self, source: Source) -> "Split":
        """The same split of a source that numbers its pictures alike."""
        return Split(source, self.items, self.labels, self.num_classes)

    def take(self, positions: Any) -> "Split":
        """The split that holds these positions only, in this order."""
        return Split(self.source, self.items[positions], self.labels[positions], self.num_classes)


@dataclass(frozen=True, eq=False)
class Data:
    """A dataset, opened.

    `classes` are sorted by name, and a label is a position among them. `fingerprint` digests the
    listing (names, sizes, labels, splits), so that a changed dataset is noticed. `notes` are
    remarks to show to people, such as a class that a split lacks. `rule` says how the splits were
    made.
    """

    name: str
    classes: tuple[str, ...]
    splits: dict[str, Split]
    fingerprint: str
    channels: int
    rule: dict[str, Any]
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def usual_side(self) -> int:
        """The median of the shorter sides of some 32 training pictures, in pixels."""
        split = self.splits["train"]
        some = range(0, len(split), max(1, len(split) // 32))
        sides = sorted(min(picture.shape[-2:]) for _, picture in readable(split, some))
        if not sides:
            raise InputError(f"none of {len(some)} training images of {self.name} could be read")
        return sides[len(sides) // 2]

    def record(self) -> dict[str, Any]:
        """What `open_data(…, record=…)` needs to make these splits again; JSON-ready."""
        record: dict[str, Any] = {
            "data": self.name,
            "classes": list(self.classes),
            "fingerprint": self.fingerprint,
            "counts": {title: len(split) for title, split in self.splits.items()},
            **self.rule,
        }
        if self.rule["made"] == "seeded":
            val = self.splits["val"]
            record["val"] = [val.name(i) for i in range(len(val))]
        return record

    def without(self, names: Iterable[str]) -> "Data":
        """The same data without the pictures so named, such as a quarantine list."""
        gone = set(names)
        if not gone:
            return self
        splits = {}
        for title, split in self.splits.items():
            keep = np.array([split.name(i) not in gone for i in range(len(split))], bool)
            splits[title] = split.take(keep)
            left = set(splits[title].labels.tolist())
            for label in sorted(set(split.labels.tolist()) - left):
                if title == "train":
                    raise InputError(
                        f"without the quarantined pictures the class {self.classes[label]!r} has "
                        "none left to train on; add readable ones or remove the class"
                    )
        return replace(self, splits=splits)


def readable_path(path: str | Path) -> str:
    """A path as text that any file can hold: bytes that are not UTF-8 are shown as \\xNN."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
