"""Reading weights files of every kind, and refusing what would run code."""

import json
import os
import pickle

import numpy as np
import pytest
import torch

from regard._io import write_weights
from regard.convert.checkpoint_files import read_state
from regard.errors import InputError

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


def same(left, right):
    return left.keys() == right.keys() and all(
        left[key].dtype == right[key].dtype and torch.equal(left[key], right[key]) for key in left
    )


@pytest.mark.parametrize("ending", ["pt", "pth", "ckpt", "bin"])
@pytest.mark.parametrize("zipped", [True, False])
def test_reads_what_torch_saved(tmp_path, ending, zipped):
    path = tmp_path / f"weights.{ending}"
    torch.save(STATE, path, _use_new_zipfile_serialization=zipped)
    assert same(read_state(path), STATE)


def test_reads_safetensors_and_npz_and_a_folder(tmp_path):
    write_weights(tmp_path / "model.safetensors", STATE)
    assert same(read_state(tmp_path / "model.safetensors"), STATE)
    assert same(read_state(tmp_path), STATE)
    np.savez(tmp_path / "weights.npz", a=np.arange(3.0))
    assert same(read_state(tmp_path / "weights.npz"), {"a": torch.arange(3.0).double()})


def write_sharded(folder, weight_map):
    write_weights(folder / "m-1.safetensors", {"a.weight": STATE["a.weight"]})
    write_weights(folder / "m-2.safetensors", {"b": STATE["b"]})
    index = folder / "m.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_reads_shards_by_their_index(tmp_path):
    index = write_sharded(tmp_path, {"a.weight": "m-1.safetensors", "b": "m-2.safetensors"})
    assert same(read_state(index), STATE)
    assert same(read_state(tmp_path), STATE)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a.weight": "m-1.safetensors", "b": "m-1.safetensors"}, "disagree about b"),
        ({"a.weight": "../m-1.safetensors"}, r"names the shard '\.\./m-1\.safetensors'"),
        ({"a.weight": "m-3.safetensors"}, "m-3.safetensors does not exist"),
        ({}, "has no weight_map"),
    ],
)
def test_refuses_a_wrong_index(tmp_path, weight_map, message):
    with pytest.raises(InputError, match=message):
        read_state(write_sharded(tmp_path, weight_map))


class Runs:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    "save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))]
)
def test_refuses_a_pickle_that_runs_code_and_does_not_run_it(tmp_path, save):
    save({"a": torch.ones(1), "b": Runs(tmp_path / "ran")}, tmp_path / "bad.ckpt")
    with pytest.raises(InputError, match=r"bad\.ckpt holds more than tensors"):
        read_state(tmp_path / "bad.ckpt")
    assert not (tmp_path / "ran").exists()


def test_refuses_an_archive_of_objects(tmp_path):
    np.savez(tmp_path / "bad.npz", a=np.array([Runs(tmp_path / "ran")], dtype=object))
    with pytest.raises(InputError, match="not an archive of plain arrays"):
        read_state(tmp_path / "bad.npz")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.pt", lambda path: torch.save(STATE, path)),
        ("a.safetensors", lambda path: write_weights(path, STATE)),
        ("a.npz", lambda path: np.savez(path, a=np.arange(100.0))),
    ],
)
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.95])
def test_refuses_a_truncated_file(tmp_path, name, write, kept):
    path = tmp_path / name
    write(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(InputError, match=rf"{name} is not a"):
        read_state(path)


def test_takes_the_one_dictionary_of_tensors_or_the_named_one(tmp_path):
    nested = {"state_dict": STATE, "epoch": 3, "hyper": {"lr": 0.1}}
    torch.save(nested, tmp_path / "one.ckpt")
    assert same(read_state(tmp_path / "one.ckpt"), STATE)
    torch.save({**nested, "ema": {"model": {"c": torch.ones(1)}}}, tmp_path / "two.ckpt")
    with pytest.raises(InputError, match=r"2 dictionaries of tensors \(state_dict, ema\.model\)"):
        read_state(tmp_path / "two.ckpt")
    assert same(read_state(tmp_path / "two.ckpt", "ema.model"), {"c": torch.ones(1)})
    with pytest.raises(InputError, match=r"no tensors under 'emo'; nearest: ema\.model"):
        read_state(tmp_path / "two.ckpt", "emo")


def test_refuses_by_name_what_it_cannot_read(tmp_path):
    with pytest.raises(InputError, match=r"gone\.pt does not exist"):
        read_state(tmp_path / "gone.pt")
    with pytest.raises(InputError, match=r"holds no weights file; it holds nothing"):
        read_state(tmp_path)
    (tmp_path / "model.h5").write_bytes(b"")
    with pytest.raises(InputError, match=r"has the ending '\.h5'"):
        read_state(tmp_path / "model.h5")
    for name in ("a.safetensors", "b.safetensors"):
        write_weights(tmp_path / name, STATE)
    with pytest.raises(InputError, match=r"holds a\.safetensors, b\.safetensors; give one"):
        read_state(tmp_path)


def test_refuses_an_entry_of_a_flat_file(tmp_path):
    write_weights(tmp_path / "a.safetensors", STATE)
    with pytest.raises(InputError, match=r"entry='ema': .* is flat"):
        read_state(tmp_path / "a.safetensors", "ema")


def test_a_dictionary_held_at_several_places_is_read_by_each_of_its_paths(tmp_path):
    shared = {"model": dict(STATE), "a.b": {"c": dict(STATE)}}
    torch.save({"best": shared, "last": shared}, tmp_path / "a.pt")
    for entry in ("best.model", "last.model", "last.a.b.c"):
        assert read_state(tmp_path / "a.pt", entry).keys() == STATE.keys()
    with pytest.raises(InputError, match=r"no tensors under 'last\.modem'"):
        read_state(tmp_path / "a.pt", "last.modem")
    torch.save({"model": {}, "ema": dict(STATE)}, tmp_path / "b.pt")
    with pytest.raises(InputError, match=r"no tensors under 'model'; nearest: ema"):
        read_state(tmp_path / "b.pt", "model")
