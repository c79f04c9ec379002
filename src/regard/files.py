"""Safe reading and atomic writing; the only module that opens a weights file."""

import contextlib
import json
import os
import pickle
import re
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from regard.errors import InputError, RegardError, nearest

PICKLED = (".pt", ".pth", ".ckpt", ".bin")
INDEX = ".safetensors.index.json"
WINDOWS = os.name == "nt"


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it replaces `path` in one step.

    The data and the directory entry are synced, so that a kill or a power loss at any instant
    leaves either the old file or the new one, whole. On an exception nothing is left behind.
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    part = Path(name)
    try:
        yield part
        # mkstemp makes files private; a written result gets the user's usual mode.
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(0o666 & ~umask)
        sync(part)
        os.replace(part, path)
        sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success it becomes `path` in one step.

    `path` may not exist beforehand. On an exception nothing is left behind.
    """
    path = Path(path)
    if path.exists():
        raise InputError(f"{path} exists already; give a new folder, or remove this one")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is no folder; create it first")
    part = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part"))
    try:
        yield part
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(0o777 & ~umask)
        sync(part)
        os.replace(part, path)
        sync(path.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk."""
    if WINDOWS and path.is_dir():
        return  # Windows opens no directory, and keeps its entries in order by itself
    handle = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some file systems cannot sync a directory; the data is synced
            raise
    finally:
        os.close(handle)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinity are refused: not JSON."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    """Read a JSON file, or refuse it by name."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid JSON ({error}); restore or remove it") from None


@contextlib.contextmanager
def meaning(path: str | Path) -> Iterator[None]:
    """Within, what is read from `path` is taken to be as we write it; else the file is refused."""
    try:
        yield
    except RegardError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise InputError(
            f"{path} is damaged, or was changed by hand ({type(error).__name__}: {error}); "
            "restore or remove it"
        ) from None


def write_weights(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as one safetensors file, atomically. Equal input gives equal bytes."""
    owned = {key: tensors[key].detach().contiguous() for key in sorted(tensors)}
    data = save(owned, dict(metadata) if metadata else None)
    with atomic_write(path) as part:
        part.write_bytes(in_order(data))


def in_order(data: bytes) -> bytes:
    """A safetensors file with its metadata sorted; the library writes them in a random order."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    if "__metadata__" not in header:
        return data
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text + data[end:]


def read_weights(path: str | Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Read the tensors of a safetensors file."""
    path = Path(path)
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; give a .safetensors file") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a whole safetensors file ({error})") from None


def read_metadata(path: str | Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty where it has none."""
    try:
        with safe_open(Path(path), framework="pt") as file:
            return dict(file.metadata() or {})
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; give a .safetensors file") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a whole safetensors file ({error})") from None


def read_state(path: str | Path, entry: str | None = None) -> dict[str, Tensor]:
    """The tensors of any weights file or folder, by name, on the CPU. Nothing in it is executed.

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
            raise InputError(f"{folder} holds {', '.join(found)}; give one of these files itself")
    raise InputError(f"{folder} holds no weights file; it holds {', '.join(names) or 'nothing'}")


def read_shards(index: Path) -> dict[str, Tensor]:
    """The tensors that an index file spreads over several files beside it."""
    listed = read_json(index)
    shard_of = listed.get("weight_map") if isinstance(listed, dict) else None
    if not isinstance(shard_of, dict) or not shard_of:
        raise InputError(f"{index} has no weight_map; give an index of sharded safetensors")
    tensors: dict[str, Tensor] = {}
    for name in sorted({str(shard) for shard in shard_of.values()}):
        if not re.fullmatch(r"[^/\\]+\.safetensors", name):
            raise InputError(
                f"{index} names the shard {name!r}; only safetensors beside it are read"
            )
        held = read_weights(index.parent / name)
        wanted = {key for key, shard in shard_of.items() if shard == name}
        wrong = sorted(wanted ^ held.keys())
        if wrong:
            raise InputError(f"{index} and its shard {name} disagree about {', '.join(wrong[:10])}")
        tensors.update(held)
    return tensors


def read_npz(path: Path) -> dict[str, Tensor]:
    """The arrays of a NumPy archive; one that holds pickled objects is refused."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {key: torch.from_numpy(archive[key]) for key in archive.files}
    except (ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is not an archive of plain arrays ({error})") from None


def read_pickled(path: Path) -> Any:
    """What torch.save wrote, by the unpickler that builds only tensors and plain containers."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = re.search(r"WeightsUnpickler error: *\s*(\S[^\n]*)", str(error))
        raise InputError(
            f"{path} holds more than tensors, and reading it could run code of the file's author "
            f"({reason[1] if reason else 'not a file of weights'}); save its state dict as "
            ".safetensors where you trust it"
        ) from None
    except (RuntimeError, EOFError, ValueError, OSError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is not a whole file written by torch.save ({error})") from None


def choose_entry(value: Any, entry: str | None, path: Path) -> dict[str, Tensor]:
    """The dictionary of tensors in a checkpoint: the one there is, or the one named."""
    found = dict(tensor_dicts(value))
    if entry is not None:
        if entry not in found:
            raise InputError(f"{path} has no tensors under {entry!r}; {nearest(entry, found)}")
        return found[entry]
    if "" in found:
        return found[""]
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise InputError(f"{path} holds {len(found)} dictionaries of tensors ({names}); name one")
    return next(iter(found.values()))


def tensor_dicts(
    value: Any, name: str = "", within: tuple[int, ...] = ()
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Every dictionary in a checkpoint that holds nothing but tensors by name, with its path.

    `within` identifies the dictionaries around it: a checkpoint may hold itself.
    """
    if not isinstance(value, Mapping) or not value or id(value) in within:
        return
    if all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items()):
        yield name, dict(value)
        return
    for key, inner in value.items():
        path = f"{name}.{key}" if name else str(key)
        yield from tensor_dicts(inner, path, (*within, id(value)))
