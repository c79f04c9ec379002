"""What an exported file says about itself: enough to use it, and to know where it comes from."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.errors import InputError
from regard.images import Preprocess

FORMAT = "regard-export-1"
# What a file takes, and what it gives: tensor -> logits, image -> probabilities.
TAKES = ("tensor", "image")
PRECISIONS = ("fp32", "half", "int8")


@dataclass(frozen=True)
class FileFacts:
    """The metadata of an exported file. Each field travels as one JSON value under its name."""

    takes: str
    """tensor: "images" float32 (b, c, h, w), normalised, to "logits" (b, k); image: "images"
    uint8 (b, h, w, c) of any size to "probabilities" (b, k)."""
    precision: str
    classes: tuple[str, ...]
    preprocess: Preprocess
    model: dict[str, Any]
    """The arguments of `regard.create`."""
    dynamic: tuple[str, ...]
    """The axes of the input that may have any length, by name."""
    multiple: tuple[int, int]
    """Height and width, where dynamic, must be multiples of these."""
    run: dict[str, Any]
    """name, and sha256 of its weights."""
    licence: str
    versions: dict[str, str]
    figures: dict[str, Any] = field(default_factory=dict)
    """What the proof measured; empty until then."""

    def to_metadata(self) -> dict[str, str]:
        """Strings by name, as files hold them."""
        values = {**dataclasses.asdict(self), "preprocess": self.preprocess.to_dict()}
        return {"format": FORMAT, **{key: json.dumps(value) for key, value in values.items()}}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], where: Path) -> "FileFacts":
        """Rebuild from `to_metadata`'s result, or refuse a file that regard did not export."""
        if metadata.get("format") != FORMAT:
            raise InputError(
                f"{where} does not say that it is an export of this version; give a file that "
                "`regard export` wrote"
            )
        values: dict[str, Any] = {}
        for known in dataclasses.fields(cls):
            if known.name not in metadata:
                raise InputError(f"{where} lacks the metadata {known.name!r}; export it again")
            values[known.name] = json.loads(metadata[known.name])
        for name in ("classes", "dynamic", "multiple"):
            values[name] = tuple(values[name])
        values["preprocess"] = Preprocess.from_dict(values["preprocess"])
        return cls(**values)


def digest(path: Path) -> str:
    """The SHA-256 of a file, hexadecimal."""
    running = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            running.update(block)
    return running.hexdigest()
