"""Files as locks: one holder, who is named, on every system."""

import os
import sys

import pytest

from regard import _io as locks
from regard._io import locked
from regard.errors import InputError


class Bytes:
    """msvcrt's locking: one holder a byte of a file, and nobody else reads a locked byte."""

    LK_NBLCK = 2

    def __init__(self):
        self.held = {}

    def locking(self, handle, mode, count):
        assert (mode, count) == (self.LK_NBLCK, 1)
        place = (os.fstat(handle).st_ino, os.lseek(handle, 0, os.SEEK_CUR))
        assert place[1] > os.fstat(handle).st_size, "the holder's name could not be read"
        holder = self.held.get(place, handle)
        if holder != handle and is_open(holder):  # a number used again was closed before
            raise PermissionError(13, "Permission denied")
        self.held[place] = handle


def is_open(handle):
    try:
        os.fstat(handle)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("windows", [False, True])
def test_a_lock_has_one_holder_and_names_it(tmp_path, monkeypatch, windows):
    if windows:
        monkeypatch.setattr(locks, "fcntl", None)
        monkeypatch.setitem(sys.modules, "msvcrt", Bytes())
    path = tmp_path / ".lock"

    def refusal(holder):
        return f"busy with {holder}"

    with locked(path, refusal):
        words = f"^busy with process {os.getpid()} on "
        with pytest.raises(InputError, match=words), locked(path, refusal):
            pass
        assert path.read_text().startswith(f"process {os.getpid()} on ")
    with locked(path, refusal):
        pass
