"""Writing that is whole or not at all, and the same bytes for the same tensors."""

import os

import pytest
import torch

from regard import files
from regard.errors import InputError
from regard.files import (
    atomic_folder,
    atomic_write,
    read_weights,
    write_weights,
)

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


def same(left, right):
    return left.keys() == right.keys() and all(
        left[key].dtype == right[key].dtype and torch.equal(left[key], right[key]) for key in left
    )


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "out"

    class Stop(Exception):
        pass

    def fail():
        with atomic_folder(target) as part:
            write_weights(part / "model.safetensors", STATE)
            raise Stop

    with pytest.raises(Stop):
        fail()
    assert list(tmp_path.iterdir()) == []
    with atomic_folder(target) as part:
        write_weights(part / "model.safetensors", STATE)
        assert not target.exists()
    assert [item.name for item in tmp_path.iterdir()] == ["out"]
    assert same(read_weights(target / "model.safetensors"), STATE)
    with pytest.raises(InputError, match="out exists already"), atomic_folder(target):
        pass


def test_equal_weights_give_equal_bytes(tmp_path):
    write_weights(tmp_path / "a", STATE, {"k": "v"})
    write_weights(tmp_path / "b", dict(reversed(STATE.items())), {"k": "v"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_metadata_are_written_in_one_order(tmp_path):
    path = tmp_path / "w.safetensors"
    metadata = {letter: letter.upper() for letter in "qwertyuiop"}
    write_weights(path, {"a": torch.arange(3.0)}, metadata)
    raw = path.read_bytes()
    header = raw[8 : 8 + int.from_bytes(raw[:8], "little")].decode()
    places = [header.index(f'"{letter}":"{letter.upper()}"') for letter in sorted(metadata)]
    assert places == sorted(places)
    assert torch.equal(read_weights(path)["a"], torch.arange(3.0))


def test_files_are_written_where_a_folder_cannot_be_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "WINDOWS", True)
    real = os.open

    def no_folder(path, flags, *rest):
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied")
        if flags & os.O_ACCMODE == os.O_RDONLY:
            raise AssertionError("Windows flushes only what is open for writing")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", no_folder)
    with atomic_write(tmp_path / "a") as part:
        part.write_text("whole")
    assert (tmp_path / "a").read_bytes() == b"whole"
