"""Weights files of other projects, read so that nothing in them is executed."""

import pickle
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard._io import read_json, read_weights
from regard.errors import InputError, brief, first, listing, nearest

PICKLED = (".pt", ".pth", ".ckpt", ".bin")
INDEX = ".safetensors.index.json"

# What the readers of NumPy and torch raise on a file with some bytes changed.
DAMAGE = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError),
    *(OSError, RuntimeError, SyntaxError, TypeError, ValueError),
    *(pickle.PickleError, struct.error, zipfile.BadZipFile, zlib.error),
)


def read_state(path: str | Path, entry: str | None = None) -> dict[str, Tensor]:
    """The tensors of any weights file or folder, by name, on the CPU.

    Takes .safetensors; a folder or index of sharded safetensors; .npz; and .pt, .pth, .ckpt, .bin,
    which are read by torch's restricted unpickler. Where a checkpoint nests its tensors
    (`{"state_dict": {…}, "epoch": 3}`), the one dictionary of tensors is taken, or the one that
    `entry` names ("state_dict", "ema.model").
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist; give a weights file or a folder that holds one")
    if path.is_dir():
        path = weights_file(path)
    if entry is not None and path.suffix not in PICKLED:
        raise InputError(f"entry={entry!r}: {path} is flat; only {', '.join(PICKLED)} have entries")
    if path.name.endswith(".index.json"):
        return read_shards(path)
    if path.suffix == ".safetensors":
        return read_weights(path)
    if path.suffix == ".npz":
        return read_npz(path)
    if path.suffix in PICKLED:
        return choose_entry(read_pickled(path), entry, path)
    raise InputError(
        f"{path} has the ending {path.suffix!r}; give one of .safetensors, {INDEX}, .npz, "
        f"{', '.join(PICKLED)}, or a folder that holds one"
    )


def weights_file(folder: Path) -> Path:
    """The one weights file, or index of shards, in a folder."""
    names = sorted(item.name for item in folder.iterdir())
    for ending in (".safetensors.index.json", ".safetensors", ".bin.index.json", *PICKLED, ".npz"):
        found = [name for name in names if name.endswith(ending)]
        if len(found) == 1:
            return folder / found[0]
        if found:
            raise InputError(f"{folder} holds {listing(found)}; give one of these files itself")
    raise InputError(f"{folder} holds no weights file; it holds {listing(names)}")


def read_shards(index: Path) -> dict[str, Tensor]:
    """The tensors that an index file spreads over several files beside it."""
    listed = read_json(index)
    shard_of = listed.get("weight_map") if isinstance(listed, dict) else None
    if not isinstance(shard_of, dict) or not shard_of:
        raise InputError(f"{index} has no weight_map; give an index of sharded safetensors")
    tensors: dict[str, Tensor] = {}
    for name in sorted({str(shard) for shard in shard_of.values()}):
        if not re.fullmatch(r"[^/\\\x00-\x1f\ud800-\udfff]+\.safetensors", name):
            raise InputError(
                f"{index} names the shard {brief(ascii(name))}; only safetensors beside it are read"
            )
        held = read_weights(index.parent / name)
        wanted = {key for key, shard in shard_of.items() if shard == name}
        wrong = wanted ^ held.keys()
        if wrong:
            raise InputError(f"{index} and its shard {name} disagree about {listing(wrong)}")
        tensors.update(held)
    return tensors


def read_npz(path: Path) -> dict[str, Tensor]:
    """The arrays of a NumPy archive; one that holds pickled objects is refused."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {key: torch.from_numpy(archive[key]) for key in archive.files}
    except DAMAGE as error:
        raise InputError(f"{path} is not an archive of plain arrays ({reason(error)})") from None


def reason(error: BaseException) -> str:
    """An error of another library in a few words."""
    return brief(f"{type(error).__name__}: {error}")


def read_pickled(path: Path) -> Any:
    """What torch.save wrote, by the unpickler that builds only tensors and plain containers."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        said = re.search(r"WeightsUnpickler error: *\s*(\S[^\n]*)", str(error))
        raise InputError(
            f"{path} holds more than tensors, and reading it could run code of the file's author "
            f"({brief(said[1]) if said else 'not a file of weights'}); save its state dict as "
            ".safetensors where you trust it"
        ) from None
    except DAMAGE as error:
        raise InputError(
            f"{path} is not a whole file written by torch.save ({reason(error)})"
        ) from None


def choose_entry(value: Any, entry: str | None, path: Path) -> dict[str, Tensor]:
    """The dictionary of tensors in a checkpoint: the one there is, or the one named."""
    found = dict(tensor_dicts(value))
    if entry is not None:
        inner = at(value, entry)  # a dictionary held at several places is listed at the first alone
        if isinstance(inner, Mapping) and inner and is_state(inner):
            return dict(inner)
        names = [brief(name, 120) for name in found]
        raise InputError(f"{path} has no tensors under {entry!r}; {nearest(entry, names)}")
    if "" in found:
        return found[""]
    if len(found) != 1:
        raise InputError(
            f"{path} holds {len(found)} dictionaries of tensors ({first(found)}); name one"
        )
    return next(iter(found.values()))


def at(value: Any, path: str) -> Any:
    """What a checkpoint holds at a path; None where there is nothing."""
    for key, held in value.items() if isinstance(value, Mapping) else ():
        rest = path.removeprefix(str(key))
        if rest == "":
            return held
        if rest != path and rest[0] == "." and (found := at(held, rest[1:])) is not None:
            return found
    return None


def is_state(held: Mapping[Any, Any]) -> bool:
    """Whether a dictionary holds nothing but tensors by name."""
    return all(isinstance(k, str) and isinstance(v, Tensor) for k, v in held.items())


def tensor_dicts(value: Any) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Every dictionary in a checkpoint that holds nothing but tensors by name, with its path.

    A dictionary of others that is held at several places, or within itself, is entered once: with
    n that each hold the next one twice there are 2ⁿ paths. No call nests, however deep they are.
    """
    waiting = [("", value)]
    entered: set[int] = set()
    while waiting:
        name, held = waiting.pop()
        if not isinstance(held, Mapping) or not held or id(held) in entered:
            continue
        if is_state(held):
            yield name, dict(held)
            continue
        entered.add(id(held))
        inner = [(f"{name}.{key}" if name else str(key), value) for key, value in held.items()]
        waiting += reversed(inner)
