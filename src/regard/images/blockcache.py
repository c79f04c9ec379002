"""Blocks of pictures on the disk: fetched when first wanted, and no more than a budget holds."""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from regard.errors import RegardError
from regard.files import atomic_write
from regard.locks import waiting

_SUFFIX = ".block"
_LOCKS = 64
_ABANDONED = 3600.0  # seconds after which nobody writes on

# A picture's bytes, or the reason why there are none.
Row = bytes | str


class BlockCache:
    """A folder of blocks, shared by the processes of one machine, oldest out first.

    A block lies in a file: for each row its place and length, int64 (n, 2), then the bytes. A
    negative length -1 - m is that of a reason of m bytes.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder = folder
        self.budget = budget

    def row(self, key: str, row: int, fetch: Callable[[], Sequence[Row]]) -> Row:
        """Row `row` of the block `key`, which `fetch` gives where it is not on the disk."""
        path = self.folder / (hashlib.blake2b(key.encode(), digest_size=16).hexdigest() + _SUFFIX)
        while True:
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                return read_row(file.fileno(), row)
            try:
                self._keep(path, fetch)
            except OSError as error:
                raise RegardError(
                    f"{self.folder} cannot hold a block of pictures ({error.strerror or error}); "
                    "make room there, or set REGARD_CACHE to another folder, and go on"
                ) from error

    def used(self) -> int:
        """Bytes of all blocks on the disk."""
        return sum(status.st_size for _, status in self._blocks())

    def _keep(self, path: Path, fetch: Callable[[], Sequence[Row]]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = self.folder / f".lock-{int(path.stem[:8], 16) % _LOCKS:02d}"
        with waiting(lock):  # one process fetches, the others wait for it
            if path.exists():
                return
            rows = fetch()
            with atomic_write(path) as part:
                part.write_bytes(block_of(rows))
        with waiting(self.folder / ".lock"):
            self._make_room(path)

    def _make_room(self, newest: Path) -> None:
        blocks = sorted(self._blocks(), key=lambda entry: entry[1].st_mtime_ns)
        over = sum(status.st_size for _, status in blocks) - self.budget
        for path, status in blocks:
            if over <= 0:
                break
            if path != newest:
                path.unlink(missing_ok=True)  # who reads it now reads on
                over -= status.st_size
        for path in self.folder.glob(f".*{_SUFFIX}.*.part"):  # of processes that were killed
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _ABANDONED:
                    path.unlink()

    def _blocks(self) -> list[tuple[Path, os.stat_result]]:
        found = []
        for path in self.folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                found.append((path, path.stat()))
        return found


def block_of(rows: Sequence[Row]) -> bytes:
    """The file of a block."""
    bodies = [row.encode() if isinstance(row, str) else row for row in rows]
    table = np.empty((len(rows), 2), np.int64)
    place = table.nbytes
    for i, (row, body) in enumerate(zip(rows, bodies, strict=True)):
        table[i] = place, -1 - len(body) if isinstance(row, str) else len(body)
        place += len(body)
    return table.tobytes() + b"".join(bodies)


def read_row(handle: int, row: int) -> Row:
    """One row of an open block."""
    place, length = np.frombuffer(os.pread(handle, 16, 16 * row), np.int64).tolist()
    if length < 0:
        return os.pread(handle, -1 - length, place).decode()
    return os.pread(handle, length, place)
