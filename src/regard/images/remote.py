"""Files on a disk or behind a URL (fsspec's), which a network may fail to give for a while."""

import os
import time
from collections.abc import Callable
from typing import Any

from regard.errors import RegardError

_TRIES = 5


def patiently(read: Callable[[], Any], url: str) -> Any:
    """read(), again after a pause where a network fails; `RegardError` where it does not help."""
    for trial in range(_TRIES):
        try:
            return read()
        except RegardError:
            raise
        except Exception as error:  # file systems raise their own libraries' errors
            last = trial == _TRIES - 1 or not is_remote(url) or isinstance(error, FileNotFoundError)
            if last:
                raise RegardError(
                    f"{url} cannot be read ({type(error).__name__}: {error}); bring it back, and "
                    "the same command goes on"
                ) from error
            time.sleep(2.0**trial)
    raise AssertionError


def is_remote(url: str) -> bool:
    """Whether a shard lies behind a URL rather than on a disk."""
    return "://" in url and not url.startswith("file://")


def open_url(url: str) -> Any:
    """A shard open for reading, on a disk or behind a URL."""
    if not is_remote(url):
        return open(url.removeprefix("file://"), "rb")
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    return system.open(path, "rb")


def stamp_of(url: str) -> str:
    """Changes whenever the file does."""
    if not is_remote(url):
        status = os.stat(url.removeprefix("file://"))
        return f"{status.st_size}:{status.st_mtime_ns}"
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    return str(system.ukey(path))
