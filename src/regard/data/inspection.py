"""Look at every picture of a dataset before training: read it, measure it, digest it."""

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard._io import atomic_write, read_json, write_json
from regard.data.batches import deliver
from regard.data.dataset import Data, Source
from regard.data.decode import UnreadableImage, decode, read_header
from regard.data.preprocess import resize
from regard.errors import InputError

THUMB = 8  # side of the thumbnail that near duplicates are found by
_TASK = 64  # pictures scanned by a worker at a time
_VERSION = 1  # of what is stored; an older scan is made anew


class Facts(NamedTuple):
    """What the scan knows of a picture; `reason` is empty unless it is unreadable.

    `digest` is of the decoded pixels and their shape, so a copy saved again without loss has the
    same one. `width` and `height` are upright. `thumb` holds 8 x 8 pixels of c channels.
    """

    digest: str
    reason: str
    format: str
    mode: str
    width: int
    height: int
    frames: int
    orientation: int
    thumb: bytes


def scan_item(source: Source, item: int) -> Facts:
    """Read one picture whole, as training will."""
    name, header, raw = source.name(item), None, b""
    try:
        if source.has_files:
            try:
                raw = source.raw(item)
            except OSError as error:
                raise UnreadableImage(name, error.strerror or str(error)) from None
            header = read_header(raw)
            picture = decode(raw, source.channels, name)
        else:
            picture = source.read(item)
    except UnreadableImage as error:
        kind, mode = (header.format, header.mode) if header else ("?", "?")
        return Facts(_digest(raw), error.reason, kind, mode, 0, 0, 1, 1, b"")
    c, h, w = picture.shape
    pixels = picture.permute(1, 2, 0).contiguous().numpy()
    thumb = resize(picture, (THUMB, THUMB)).round().clamp(0, 255).byte()
    return Facts(
        digest=_digest(f"{c} {h} {w} ".encode(), pixels.data),
        reason="",
        format=header.format if header else "array",
        mode=header.mode if header else "L",
        width=w,
        height=h,
        frames=header.frames if header else 1,
        orientation=header.orientation if header else 1,
        thumb=thumb.permute(1, 2, 0).contiguous().numpy().tobytes(),
    )


def _digest(*parts: bytes | memoryview) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


class _Scanner:
    """Scans a run of a source's pictures."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __call__(self, items: list[int]) -> list[Facts]:
        return [scan_item(self.source, item) for item in items]


def scan(
    data: Data,
    *,
    workers: int | None = None,
    cache: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, list[Facts]]:
    """The facts of every picture, by split and position.

    Pictures that `cache` knows by name and stamp (for files, their size and time of change) are
    not read again. `workers` is a process for each core where there is much to scan, unless given.
    `progress(done, of)` counts the pictures that are read.
    """
    source = next(iter(data.splits.values())).source
    items = np.concatenate([split.items for split in data.splits.values()]).tolist()
    keys = {item: _key(source, item) for item in items}
    known = _recall(cache) if cache is not None else {}
    fresh = [item for item in items if keys[item] not in known]
    if workers is None:
        workers = 0 if len(fresh) < 2000 else min(os.cpu_count() or 1, 16)
    tasks = [(fresh[i : i + _TASK],) for i in range(0, len(fresh), _TASK)]
    done = 0
    for (batch,), found in zip(tasks, deliver(_Scanner(source), iter(tasks), workers), strict=True):
        known.update((keys[item], facts) for item, facts in zip(batch, found, strict=True))
        done += len(batch)
        if progress is not None:
            progress(done, len(fresh))
    if cache is not None and fresh:
        _store(cache, {key: known[key] for key in keys.values()})
    return {
        title: [known[keys[item]] for item in split.items.tolist()]
        for title, split in data.splits.items()
    }


def cache_folder() -> Path:
    """Where things are kept that can be made again: REGARD_CACHE, or in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("REGARD_CACHE") or Path(base) / "regard")


def cache_path(data: Data) -> Path:
    """Where the scan of this dataset is kept."""
    remote = data.name.startswith(("hf:", "stream:"))
    name = data.name if remote else str(Path(data.name).absolute())
    what = hashlib.blake2b(f"{name}\0{data.channels}".encode(), digest_size=12).hexdigest()
    return cache_folder() / f"scan-{what}.json"


def _key(source: Source, item: int) -> str:
    try:
        stamp = source.stamp(item)
    except OSError:
        stamp = "missing"
    return f"{source.name(item)}\0{stamp}"


def _recall(path: Path) -> dict[str, Facts]:
    """What an earlier scan knew; a cache that is absent, old or broken knows nothing."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["version"] != _VERSION:
            return {}
        rows = stored["facts"].items()
        return {key: Facts._make([*row[:-1], bytes.fromhex(row[-1])]) for key, row in rows}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _store(path: Path, known: dict[str, Facts]) -> None:
    rows = {key: [*facts[:-1], facts.thumb.hex()] for key, facts in known.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as part:
        part.write_text(json.dumps({"version": _VERSION, "facts": rows}), encoding="utf-8")


# Pictures that occur twice: the same pixels, or nearly the same picture.


# On CIFAR-10, 43,000 pairs of splits apart, nearly all above 0.98 show the same, and copies saved
# again as JPEG of quality 60, scaled by 1.5 or darkened by a tenth all lie above it.
SIMILARITY = 0.98
BRIGHTNESS = 24.0  # grey levels by which the means of near duplicates may differ
_FLOOR = 1.0  # grey levels: contrast no larger counts as noise
_ROWS = 1024  # rows compared at a time


class Pair(NamedTuple):
    """Position i of one split, j of another; `similarity` is 1 for the same pixels."""

    i: int
    j: int
    similarity: float


def same(digests: list[str]) -> list[list[int]]:
    """Groups of positions with equal digests, of two or more."""
    groups: dict[str, list[int]] = defaultdict(list)
    for position, digest in enumerate(digests):
        groups[digest].append(position)
    return [group for group in groups.values() if len(group) > 1]


def describe(thumbs: Tensor) -> tuple[Tensor, Tensor]:
    """Thumbnails (n, d) in 0..255 to unit-contrast descriptors (n, d) and mean levels (n,).

    x = (t - mean t) / sqrt(sum (t - mean t)² + d · 1²), so that x · y is the correlation of two
    thumbnails, drawn towards 0 where contrast is no more than noise.
    """
    values = thumbs.to(torch.float32)
    level = values.mean(1)
    centred = values - level[:, None]
    energy = centred.square().sum(1, keepdim=True) + values.shape[1] * _FLOOR**2
    return centred / energy.sqrt(), level


def near(queries: Tensor, corpus: Tensor) -> list[Pair]:
    """For each query thumbnail its most similar one in the corpus, where that is close enough.

    Every query is compared with all of the corpus: exact, and for thumbnails far cheaper than
    the decoding that made them.
    """
    pairs = []
    (x, x_level), (y, y_level) = describe(queries), describe(corpus)
    for start in range(0, len(x), _ROWS):
        rows = slice(start, start + _ROWS)
        score = x[rows] @ y.T
        score.masked_fill_((x_level[rows, None] - y_level).abs() > BRIGHTNESS, -1.0)
        best, where = score.max(1)
        for row in torch.nonzero(best >= SIMILARITY).flatten().tolist():
            pairs.append(Pair(start + row, int(where[row]), float(best[row])))
    return pairs


# The pre-scan: what training would stumble over, found and named before it starts.


FORMAT = "regard quarantine 1"


class Place(NamedTuple):
    """A picture: its split and position there."""

    split: str
    i: int


class Twin(NamedTuple):
    """Two pictures that show the same; `similarity` is 1 for the same pixels."""

    first: Place
    second: Place
    similarity: float


@dataclass(frozen=True, eq=False)
class Inspection:
    """What the scan found. `leaks` pairs a held-out picture with one of an earlier split."""

    data: Data
    facts: dict[str, list[Facts]]
    unreadable: tuple[Place, ...]
    duplicates: tuple[tuple[Place, ...], ...]
    leaks: tuple[Twin, ...]
    conflicts: tuple[Twin, ...]
    notes: tuple[str, ...]

    def name(self, place: Place) -> str:
        """The path or id of a picture."""
        return self.data.splits[place.split].name(place.i)

    def label(self, place: Place) -> str:
        """The class of a picture."""
        return self.data.classes[int(self.data.splits[place.split].labels[place.i])]

    def fact(self, place: Place) -> Facts:
        """What is known of a picture."""
        return self.facts[place.split][place.i]

    def readable(self) -> list[Facts]:
        """The facts of all pictures that can be read."""
        return [fact for facts in self.facts.values() for fact in facts if not fact.reason]

    def quarantine(self, leaks: bool = False) -> dict[str, Any]:
        """The list that `open_data(…, quarantine=…)` leaves out; JSON-ready.

        It holds the unreadable pictures and, with `leaks`, the training pictures that show the
        same as a held-out one. The other findings stand beside it, to be moved there by hand.
        """
        out = [
            {"name": self.name(place), "split": place.split, "reason": self.fact(place).reason}
            for place in self.unreadable
        ]
        if leaks:
            copies = {
                twin.second: twin.first for twin in self.leaks if twin.second.split == "train"
            }
            out += [
                {
                    "name": self.name(place),
                    "split": place.split,
                    "reason": f"shows the same as {self.name(held)} in {held.split}",
                }
                for place, held in sorted(copies.items())
            ]
        return {
            "format": FORMAT,
            "data": self.data.name,
            "fingerprint": self.data.fingerprint,
            "quarantined": out,
            "duplicates": [[self.name(place) for place in group] for group in self.duplicates],
            "leaks": [self._twin(twin) for twin in self.leaks],
            "conflicts": [self._twin(twin) for twin in self.conflicts],
        }

    def write_quarantine(self, path: str | Path, leaks: bool = False) -> None:
        """Write `quarantine` as JSON."""
        write_json(path, self.quarantine(leaks))

    def _twin(self, twin: Twin) -> dict[str, Any]:
        return {
            "names": [self.name(twin.first), self.name(twin.second)],
            "splits": [twin.first.split, twin.second.split],
            "labels": [self.label(twin.first), self.label(twin.second)],
            "similarity": round(twin.similarity, 4),
        }


def inspect_data(
    data: Data,
    *,
    workers: int | None = None,
    cache: str | Path | None = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Inspection:
    """Scan every picture of `data`.

    What is found is kept in `cache`, a file ("auto": one in the user's cache folder; None: not at
    all), and pictures unchanged since are not read again. `workers` and `progress` are as in
    `scan`.
    """
    path = cache_path(data) if cache == "auto" else Path(cache) if cache is not None else None
    facts = scan(data, workers=workers, cache=path, progress=progress)
    places = [Place(title, i) for title, found in facts.items() for i in range(len(found))]
    unreadable = tuple(place for place in places if facts[place.split][place.i].reason)
    good = [place for place in places if not facts[place.split][place.i].reason]
    groups = same([facts[place.split][place.i].digest for place in good])
    duplicates = tuple(tuple(good[k] for k in group) for group in groups)
    leaks = _leaks(facts, duplicates)
    return Inspection(
        data=data,
        facts=facts,
        unreadable=unreadable,
        duplicates=duplicates,
        leaks=leaks,
        conflicts=_conflicts(data, duplicates, leaks),
        notes=(*data.notes, *_remarks(data, facts, good)),
    )


def read_quarantine(path: str | Path, data: Data) -> list[str]:
    """The names on a quarantine list, if it was made for this data as it is now."""
    stored = read_json(path)
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise InputError(f"{path} is no quarantine list; make one with regard inspect {data.name}")
    if stored["fingerprint"] != data.fingerprint:
        raise InputError(
            f"{data.name} has changed since the scan that wrote {path}; run regard inspect "
            f"{data.name} again"
        )
    return [entry["name"] for entry in stored["quarantined"]]


def _leaks(
    facts: dict[str, list[Facts]], groups: tuple[tuple[Place, ...], ...]
) -> tuple[Twin, ...]:
    """Each held-out picture that an earlier split shows too, with the most similar there."""
    found = {}
    for group in groups:
        for place in group:
            earlier = [other for other in group if _before(other.split, place.split)]
            if earlier:
                found[place] = Twin(place, earlier[0], 1.0)
    titles = list(facts)
    for n, title in enumerate(titles):
        for earlier_title in titles[:n]:
            mine, my_thumbs = _thumbs(facts[title])
            theirs, their_thumbs = _thumbs(facts[earlier_title])
            if not mine or not theirs:
                continue
            for i, j, similarity in near(my_thumbs, their_thumbs):
                place = Place(title, mine[i])
                # 1 is for the same pixels only
                twin = Twin(place, Place(earlier_title, theirs[j]), min(similarity, 0.9999))
                if place not in found or similarity > found[place].similarity:
                    found[place] = twin
    return tuple(sorted(found.values(), key=lambda twin: (-twin.similarity, twin.first)))


def _before(first: str, second: str) -> bool:
    order = ("train", "val", "test")
    return order.index(first) < order.index(second)


def _thumbs(facts: list[Facts]) -> tuple[list[int], Tensor]:
    """Positions and thumbnails, as (n, d) rows, of the readable."""
    positions = [i for i, fact in enumerate(facts) if not fact.reason]
    stored = bytearray(b"".join(facts[i].thumb for i in positions))
    if not positions:
        return positions, torch.empty(0, THUMB * THUMB)
    return positions, torch.frombuffer(stored, dtype=torch.uint8).view(len(positions), -1)


def _conflicts(
    data: Data, groups: tuple[tuple[Place, ...], ...], leaks: tuple[Twin, ...]
) -> tuple[Twin, ...]:
    """Twins whose labels disagree: within a group each label once against the first picture's."""

    def label(place: Place) -> int:
        return int(data.splits[place.split].labels[place.i])

    found = []
    for group in groups:
        others = {label(place): place for place in reversed(group[1:])}
        found += [
            Twin(group[0], place, 1.0)
            for other, place in sorted(others.items())
            if other != label(group[0])
        ]
    known = {frozenset((twin.first, twin.second)) for twin in found}
    found += [
        twin
        for twin in leaks
        if label(twin.first) != label(twin.second)
        and frozenset((twin.first, twin.second)) not in known
    ]
    return tuple(found)


def _remarks(data: Data, facts: dict[str, list[Facts]], good: list[Place]) -> list[str]:
    """What is worth saying though it is no fault."""
    known = [facts[place.split][place.i] for place in good]
    notes = []
    if sum(fact.frames > 1 for fact in known):
        count = sum(fact.frames > 1 for fact in known)
        notes.append(f"{count:,} files hold several frames or pages; the first is read")
    if any(fact.orientation not in (0, 1) for fact in known):
        count = sum(fact.orientation not in (0, 1) for fact in known)
        notes.append(f"{count:,} pictures are turned upright as their metadata say")
    grey = Counter(fact.mode in ("1", "L") or fact.mode.startswith("I") for fact in known)
    if data.channels == 3 and known and grey[False] == 0:
        notes.append("every picture is grey; --channels 1 trains on one channel")
    train = Counter(data.splits["train"].labels.tolist())
    most, least = max(train.values()), min(train.values())
    if most >= 10 * least:
        notes.append(f"the largest class has {most / least:.0f} times the pictures of the smallest")
    return notes
