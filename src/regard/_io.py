"""Our own files: safe reading, and writing that is whole or not at all."""

import contextlib
import functools
import importlib
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from regard.errors import InputError

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
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON ({error}); restore or remove it") from None


@contextlib.contextmanager
def meaning(path: str | Path) -> Iterator[None]:
    """Within, what is read from `path` is taken to be as we write it; else the file is refused."""
    try:
        yield
    except InputError as error:
        if str(path) in str(error):
            raise
        raise InputError(f"{path}: {error}") from None
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise InputError(
            f"{path} is damaged, or was changed by hand ({type(error).__name__}: {error}); "
            "restore or remove it"
        ) from None


def write_weights(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as one safetensors file, atomically. Equal input gives equal bytes.

    Tensors may share memory; each is written in full. Raises InputError for those that the
    format cannot hold (`unwritable`).
    """
    bad = unwritable(tensors)
    if bad:
        raise InputError(
            f"{path} cannot hold {', '.join(bad[:5])}; give dense tensors, named by plain text"
        )
    data = save(separate(tensors), dict(metadata) if metadata else None)
    with atomic_write(path) as part:
        part.write_bytes(in_order(data))


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, contiguous, sorted by name; those in memory of an earlier one are copied."""
    owned: dict[str, Tensor] = {}
    memory: set[int] = set()
    for key in sorted(tensors):
        # conjugation and negation may be marks on a tensor, which its bytes do not show
        tensor = tensors[key].detach().resolve_conj().resolve_neg().contiguous()
        if tensor.untyped_storage().data_ptr() in memory:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        memory.add(tensor.untyped_storage().data_ptr())
        owned[key] = tensor
    return owned


def unwritable(tensors: Mapping[Any, Any]) -> list[str]:
    """Name and reason of each entry that a safetensors file cannot hold."""
    reasons = {key: obstacle(key, tensor) for key, tensor in tensors.items()}
    return [f"{key!a} ({reason})" for key, reason in reasons.items() if reason]


def obstacle(key: Any, tensor: Any) -> str | None:
    """Why a safetensors file cannot hold the tensor under that name."""
    if not isinstance(key, str) or key == "__metadata__" or re.search("[\ud800-\udfff]", key):
        return "no name of a tensor"
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__}, no tensor"
    if tensor.is_meta:
        return "a meta tensor, without values"
    if tensor.is_nested or tensor.layout != torch.strided:
        return "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
    return None if is_writable(tensor.dtype) else f"numbers of type {tensor.dtype}"


@functools.cache
def is_writable(dtype: torch.dtype) -> bool:
    """Whether safetensors, as installed, writes numbers of that type."""
    try:
        save({"": torch.empty(1, dtype=dtype)})
    except (LookupError, RuntimeError, SafetensorError):
        return False
    return True


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
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not a whole safetensors file ({error})") from None


def read_metadata(path: str | Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty where it has none."""
    try:
        with safe_open(Path(path), framework="pt") as file:
            return dict(file.metadata() or {})
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; give a .safetensors file") from None
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not a whole safetensors file ({error})") from None


# Files as locks between processes.


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCKED_BYTE = 1 << 30


@contextlib.contextmanager
def locked(path: Path, refusal: Callable[[str], str]) -> Iterator[None]:
    """Hold the file `path` as a lock, which the system frees with the process.

    Where another process holds it, `InputError` says `refusal` of that process, in words.
    """
    with path.open("a+") as handle:
        try:
            take_lock(handle.fileno())
        except BlockingIOError:
            handle.seek(0)
            raise InputError(refusal(handle.read().strip() or "another process")) from None
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {socket.gethostname()}")
        handle.flush()
        yield


@contextlib.contextmanager
def waiting(path: Path) -> Iterator[None]:
    """Hold the file `path` as a lock, after whoever holds it now."""
    with path.open("a") as handle:
        take_lock(handle.fileno(), wait=True)
        yield


def take_lock(handle: int, wait: bool = False) -> None:
    """Lock an open file for this process until it closes it.

    Where another has it: BlockingIOError, or its end is waited for.
    """
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    msvcrt: Any = importlib.import_module("msvcrt")
    # Windows locks bytes, which nobody else can read then: one far behind the holder's name.
    os.lseek(handle, LOCKED_BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
    except PermissionError as error:
        raise BlockingIOError(*error.args) from None
    finally:
        os.lseek(handle, 0, os.SEEK_SET)
