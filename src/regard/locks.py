"""Files as locks between processes."""

import contextlib
import importlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from regard.errors import InputError

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
