"""Opening data: one word, a folder, a manifest or a Hugging Face data set."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from regard.errors import InputError
from regard.images.data import Data
from regard.images.decode import check_channels
from regard.images.digits import list_digits
from regard.images.folder import list_folder, list_zip
from regard.images.hub import list_hub
from regard.images.inspection import read_quarantine
from regard.images.manifest import MANIFEST_SUFFIXES, list_manifest
from regard.images.splits import Listing, assemble
from regard.images.stream import list_stream


def open_data(
    spec: str | Path,
    *,
    channels: int | None = None,
    seed: int = 0,
    val_fraction: float = 0.1,
    record: dict[str, Any] | None = None,
    quarantine: str | Path | None = None,
) -> Data:
    """Open `spec`.

    - "digits": scikit-learn's embedded digits.
    - a folder, or a zip, of train/ val/ [test/] with class folders, or of class folders alone.
    - a .csv, .tsv or .parquet manifest with columns path, label and, if wanted, split.
    - "hf:NAME_OR_PATH" ("hf:NAME:CONFIG"): a Hugging Face data set.
    - "stream:NAME_OR_PATH": the same in Parquet or tar shards, of which only what is in use lies
      on the disk.

    `channels` is 1 or 3; unless given, the digits have 1 and all else 3. Where the source has no
    val split, a stratified one of `val_fraction` is drawn, keyed by `seed`; `record`, an earlier
    `Data.record()`, brings back exactly the splits it was made from, or refuses changed data.
    `quarantine`, a list that `regard inspect` wrote for this data as it is now, is left out of the
    splits, which are otherwise the same as without it.
    """
    if channels is not None:
        check_channels(channels)
    listing = _list(str(spec), channels)
    data = assemble(listing, seed=seed, val_fraction=val_fraction, record=record)
    if quarantine is None:
        return data
    names = read_quarantine(quarantine, data)
    note = f"{len(names):,} pictures on the quarantine list {quarantine} are left out"
    return replace(data.without(names), notes=(*data.notes, note))


def _list(spec: str, channels: int | None) -> Listing:
    if not spec.strip():
        raise InputError("no DATA came; give a folder, `.` for the one you are in, or digits")
    path = Path(spec)
    if spec == "digits":
        return list_digits(channels)
    if spec.startswith("hf:"):
        return list_hub(spec.removeprefix("hf:"), channels)
    if spec.startswith("stream:"):
        return list_stream(spec.removeprefix("stream:"), channels)
    if path.is_dir():
        return list_folder(path, channels)
    if path.is_file() and path.suffix.lower() == ".zip":
        return list_zip(path, channels)
    if path.is_file() and path.suffix.lower() in MANIFEST_SUFFIXES:
        return list_manifest(path, channels)
    what = "is a file of another kind" if path.exists() else "does not exist"
    raise InputError(
        f"{spec!r} {what}; give digits, a folder or zip of class folders, a .csv, .tsv or "
        ".parquet manifest, hf:NAME_OR_PATH or stream:NAME_OR_PATH"
    )
