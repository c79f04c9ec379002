"""Safe reading and atomic writing; the only module that opens a weights file."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from regard.errors import InputError


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


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
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


def write_weights(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as one safetensors file, atomically. Equal input gives equal bytes."""
    owned = {key: tensors[key].detach().contiguous() for key in sorted(tensors)}
    data = save(owned, dict(metadata) if metadata else None)
    with atomic_write(path) as part:
        part.write_bytes(data)


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
