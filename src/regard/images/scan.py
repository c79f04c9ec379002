"""Look at every picture of a dataset before training: read it, measure it, digest it."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from regard.files import atomic_write
from regard.images.data import Data, Source
from regard.images.decode import UnreadableImage, decode, read_header
from regard.images.preprocess import resize
from regard.images.workers import deliver

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
