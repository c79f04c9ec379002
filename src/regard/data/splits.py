"""From a listing of labelled pictures to `Data`: classes by name, splits given or seeded."""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.data.counter_rng import SPLIT, uniform
from regard.data.dataset import Data, Source, Split
from regard.errors import InputError

ALIASES = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}


@dataclass
class Listing:
    """Every picture of a source, in a fixed order: its class and its split by name.

    `splits` is "" throughout where the source has none. `sizes` go into the fingerprint: bytes,
    checksums, whatever the source knows without reading the pictures.
    """

    name: str
    source: Source
    labels: Sequence[str]
    splits: Sequence[str]
    sizes: Sequence[int]
    notes: tuple[str, ...] = ()


def assemble(
    listing: Listing, *, seed: int, val_fraction: float, record: dict[str, Any] | None = None
) -> Data:
    """Match classes by name and make the splits; raises `InputError` for what cannot be used.

    Given splits are kept. Where there is no "val", one is drawn from the training pictures:
    stratified, about `val_fraction` of each class and at least one, those with the smallest draws
    keyed by (seed, name), so that adding or removing a file moves few others. Of streamed data
    whole blocks are held out, as reading the split is to read no others.
    """
    if len(listing.labels) == 0:
        raise InputError(
            f"{listing.name} has no pictures; needed are class folders, a manifest or a data set "
            "that holds some"
        )
    source = listing.source
    splits = np.asarray([title or "train" for title in listing.splits], object)
    labels, classes, notes = _classes(listing, splits)
    rule: dict[str, Any] = {"made": "given"}
    if "val" not in splits:
        rule = {"made": "seeded", "seed": seed, "val_fraction": val_fraction}
        _check_drawable(listing, classes, labels, splits, val_fraction)
    fingerprint = _fingerprint(listing)
    if record is not None:
        rule = _check_record(record, listing, classes, fingerprint)
        source.window = rule.get("window", 0)
    if rule["made"] == "seeded":
        if record is not None:
            _recall(listing, splits, record)
        elif source.streamed:
            notes += _draw_blocks(listing, splits, labels, seed, val_fraction)
        else:
            _draw(listing, splits, labels, seed, val_fraction)
    if source.streamed:
        rule["window"] = source.window
    return Data(
        name=listing.name,
        classes=classes,
        splits={
            title: Split(source, positions, labels[positions], len(classes))
            for title in ("train", "val", "test")
            if len(positions := np.flatnonzero(splits == title))
        },
        fingerprint=fingerprint,
        channels=source.channels,
        rule=rule,
        notes=(*listing.notes, *notes),
    )


def _classes(
    listing: Listing, splits: np.ndarray
) -> tuple[np.ndarray, tuple[str, ...], tuple[str, ...]]:
    """Label numbers, the training classes in order, and a note for each class a split lacks."""
    names = np.asarray(listing.labels, object)
    present = {title: set(names[splits == title].tolist()) for title in sorted(set(splits))}
    if "train" not in present:
        raise InputError(
            f"{listing.name} has no training pictures, only {', '.join(sorted(present))}; "
            "add a train split"
        )
    classes = tuple(sorted(present["train"]))
    if len(classes) < 2:
        raise InputError(
            f"{listing.name} has one class, {classes[0]!r}; to classify, at least two are needed"
        )
    notes = []
    for title in sorted(set(present) - {"train"}):
        added = sorted(present[title] - set(classes))
        if added:
            raise InputError(
                f"the {title} split of {listing.name} has classes that train lacks: "
                f"{_some(added)}; add training pictures of them or remove them from {title}"
            )
        lacked = sorted(set(classes) - present[title])
        if lacked:
            notes.append(f"the {title} split lacks {len(lacked)} of the classes: {_some(lacked)}")
    number = {name: label for label, name in enumerate(classes)}
    return np.array([number[name] for name in names], np.int64), classes, tuple(notes)


def _check_drawable(
    listing: Listing,
    classes: tuple[str, ...],
    labels: np.ndarray,
    splits: np.ndarray,
    val_fraction: float,
) -> None:
    if not 0 < val_fraction < 1:
        raise InputError(
            f"val_fraction is {val_fraction}; with no val split given, it must lie between 0 and 1"
        )
    counts = Counter(labels[splits == "train"].tolist())
    alone = [name for label, name in enumerate(classes) if counts[label] < 2]
    if alone:
        raise InputError(
            f"{listing.name} has only one picture of {_some(alone)}; a class needs at least two, "
            "one to train on and one held out: add pictures, remove the class, or give a val split"
        )


def _draw(
    listing: Listing, splits: np.ndarray, labels: np.ndarray, seed: int, val_fraction: float
) -> None:
    """Mark the held-out pictures "val" in `splits`."""
    pool = np.flatnonzero(splits == "train")
    hashes = [_hash(listing.source.name(int(i))) for i in pool]
    draws = uniform(seed, SPLIT, np.array(hashes, np.uint64))
    for label in np.unique(labels[pool]):
        mine = np.flatnonzero(labels[pool] == label)
        held = min(max(1, math.floor(len(mine) * val_fraction + 0.5)), len(mine) - 1)
        order = np.argsort(draws[mine], kind="stable")
        splits[pool[mine[order[:held]]]] = "val"


def _draw_blocks(
    listing: Listing, splits: np.ndarray, labels: np.ndarray, seed: int, val_fraction: float
) -> tuple[str, ...]:
    """Mark held-out blocks "val": those with the smallest draws, as long as every class is left.

    Returns remarks for people.
    """
    pool = np.flatnonzero(splits == "train")
    blocks = listing.source.blocks(pool)
    left = Counter(labels[pool].tolist())
    present = np.unique(blocks)
    wanted, held = val_fraction * len(pool), 0
    for block in present[np.argsort(uniform(seed, SPLIT, present), kind="stable")]:
        if held >= wanted:
            break
        mine = pool[blocks == block]
        taken = Counter(labels[mine].tolist())
        if all(left[label] > count for label, count in taken.items()):
            splits[mine] = "val"
            left -= taken
            held += len(mine)
    if held == 0:
        raise InputError(
            f"{listing.name} has {len(present)} blocks, none of which can be held out without "
            "losing a class; give it a val split, write smaller row groups, or load it by hf:"
        )
    lacked = len(left) - len(np.unique(labels[splits == "val"]))
    said = f"{held:,} pictures in whole blocks are held out, as no val split is given"
    return (said + f"; they lack {lacked} of the classes" * bool(lacked),)


def _recall(listing: Listing, splits: np.ndarray, record: dict[str, Any]) -> None:
    """Mark the pictures that a record holds out."""
    held = set(record["val"])
    for i in np.flatnonzero(splits == "train"):
        if listing.source.name(int(i)) in held:
            splits[i] = "val"
    if not (splits == "val").any():
        raise InputError(
            f"no picture that the split on record holds out is in {listing.name}; restore the "
            "split, or give the data it was made from"
        )


def check_shape(record: Any) -> None:
    """Raise what a record of a split raises that is none: `TypeError`, `KeyError`, `ValueError`."""
    if record["made"] not in ("given", "seeded"):
        raise ValueError(f"made is {record['made']!r}")
    for name in ("val", "classes") if record["made"] == "seeded" else ("classes",):
        if not all(isinstance(entry, str) for entry in record[name]):
            raise TypeError(f"{name} holds more than names")
    if not isinstance(record["fingerprint"], str):
        raise TypeError(f"fingerprint is {record['fingerprint']!r}")


def _check_record(
    record: dict[str, Any], listing: Listing, classes: tuple[str, ...], fingerprint: str
) -> dict[str, Any]:
    if list(classes) != list(record["classes"]):
        raise InputError(
            f"{listing.name} has the classes {_some(classes)}; the split on record was made for "
            f"{_some(record['classes'])}. Give the data it was made from"
        )
    if fingerprint != record["fingerprint"]:
        raise InputError(
            f"{listing.name} has changed since its split was made (files were added, removed or "
            "altered); bring the data back, or start a new run"
        )
    return {k: record[k] for k in ("made", "seed", "val_fraction", "window") if k in record}


def _fingerprint(listing: Listing) -> str:
    digest = hashlib.sha256()
    for i, (label, split, size) in enumerate(
        zip(listing.labels, listing.splits, listing.sizes, strict=True)
    ):
        digest.update(f"{listing.source.name(i)}\0{label}\0{split}\0{size}\n".encode())
    return digest.hexdigest()


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _some(names: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
