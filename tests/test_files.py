"""Writing that is whole or not at all, and the same bytes for the same tensors."""

import os

import pytest
import torch

from regard import _io as files
from regard._io import atomic_folder, atomic_write, read_json, read_weights, write_weights
from regard.errors import InputError

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


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "1" * 5_000, '{"a": ', "\xff", ""]
)
def test_json_that_cannot_be_read_is_refused_by_name(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"config\.json is not valid JSON .*restore or remove it"):
        read_json(path)


def test_tensors_that_share_memory_are_each_written_in_full(tmp_path):
    rows = torch.arange(12.0).reshape(3, 4)
    tensors = {"tied": rows, "again": rows, "upper": rows[:2], "lower": rows[1:], "turned": rows.T}
    write_weights(tmp_path / "a", tensors)
    assert same(read_weights(tmp_path / "a"), tensors)
    write_weights(tmp_path / "b", {key: tensor.clone() for key, tensor in tensors.items()})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_conjugate_view_is_written_as_its_values(tmp_path):
    number = torch.tensor([1 + 2j])
    write_weights(tmp_path / "a", {"z": number.conj(), "im": number.conj().imag})
    held = read_weights(tmp_path / "a")
    assert held["z"].tolist() == [1 - 2j]
    assert held["im"].tolist() == [-2.0]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"a": torch.eye(2).to_sparse()}, r"'a' \(a tensor of layout torch\.sparse_coo\)"),
        ({"a": torch.empty(2, device="meta")}, r"'a' \(a meta tensor, without values\)"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, r"'a' \(numbers of type torch\.complex128"),
        ({"a": [1.0]}, r"'a' \(a list, no tensor\)"),
        ({"\ud800": torch.ones(2)}, r"'\\ud800' \(no name of a tensor\)"),
        ({"__metadata__": torch.ones(2)}, r"'__metadata__' \(no name of a tensor\)"),
        ({1: torch.ones(2)}, r"1 \(no name of a tensor\)"),
    ],
)
def test_what_safetensors_cannot_hold_is_refused_by_name(tmp_path, entry, reason):
    with pytest.raises(InputError, match=rf"w\.safetensors cannot hold {reason}"):
        write_weights(tmp_path / "w.safetensors", {**STATE, **entry})
    assert list(tmp_path.iterdir()) == []
