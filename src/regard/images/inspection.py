"""The pre-scan: what training would stumble over, found and named before it starts."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import InputError
from regard.files import read_json, write_json
from regard.images.data import Data
from regard.images.duplicates import near, same
from regard.images.scan import THUMB, Facts, cache_path, scan

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
