"""Opening data: one word, a folder, a manifest or a Hugging Face data set."""

from pathlib import Path
from typing import Any

from regard.errors import InputError
from regard.images.data import Data
from regard.images.decode import check_channels
from regard.images.digits import list_digits
from regard.images.folder import list_folder, list_zip
from regard.images.splits import Listing, assemble


def open_data(
    spec: str | Path,
    *,
    channels: int | None = None,
    seed: int = 0,
    val_fraction: float = 0.1,
    record: dict[str, Any] | None = None,
) -> Data:
    """Open `spec`: "digits", a folder or zip of class folders.

    `channels` is 1 or 3; unless given, the digits have 1 and all else 3. Where the source has no
    val split, a stratified one of `val_fraction` is drawn, keyed by `seed`; `record`, an earlier
    `Data.record()`, brings back exactly the splits it was made from, or refuses changed data.
    """
    if channels is not None:
        check_channels(channels)
    listing = _list(str(spec), channels)
    return assemble(listing, seed=seed, val_fraction=val_fraction, record=record)


def _list(spec: str, channels: int | None) -> Listing:
    path = Path(spec)
    if spec == "digits":
        return list_digits(channels)
    if path.is_dir():
        return list_folder(path, channels)
    if path.is_file() and path.suffix.lower() == ".zip":
        return list_zip(path, channels)
    raise InputError(
        f"there is no data {spec!r}; give digits, a folder of class folders or a zip of them"
    )
