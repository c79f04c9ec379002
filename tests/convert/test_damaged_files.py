"""Weights files with bytes changed, and files made to mislead: read, or refused by name."""

import io
import json
import random
import zipfile

import numpy as np
import pytest
import torch

from regard._io import write_weights
from regard.convert.checkpoint_files import choose_entry, read_state
from regard.errors import InputError

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
ARRAYS = {"a": np.arange(30.0), "b": np.ones((2, 3), dtype=np.int32)}


def write_index(path):
    write_weights(path.parent / "m.safetensors", STATE)
    path.write_text(json.dumps({"weight_map": dict.fromkeys(STATE, "m.safetensors")}))


FORMATS = {
    "zip.pt": lambda path: torch.save(STATE, path),
    "legacy.pt": lambda path: torch.save(STATE, path, _use_new_zipfile_serialization=False),
    "plain.npz": lambda path: np.savez(path, **ARRAYS),
    "packed.npz": lambda path: np.savez_compressed(path, **ARRAYS),
    "a.safetensors": lambda path: write_weights(path, STATE),
    "a.safetensors.index.json": write_index,
}


def mutated(data, seed):
    """The bytes with up to five changes: one replaced, some cut out, inserted, set, or the end."""
    chance = random.Random(seed)
    for _ in range(chance.choice([1, 1, 2, 5])):
        at = chance.randrange(len(data) - 4)
        some = bytes(chance.randrange(256) for _ in range(8))
        data = chance.choice(
            [
                data[:at] + some[:1] + data[at + 1 :],
                data[:at] + some[:1] + data[at + 1 :],
                data[:at] + data[at + chance.randrange(1, 20) :] + some,
                data[:at] + some + data[at:],
                data[:at] + b"\xff\xff\xff\x7f" + data[at + 4 :],
                data[: max(at, 8)],
            ]
        )
    return data


def refusal(path):
    """What the refusal of the file says; None where its tensors are read."""
    try:
        assert all(isinstance(value, torch.Tensor) for value in read_state(path).values())
    except InputError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", FORMATS)
def test_changed_bytes_are_read_or_refused_by_name(tmp_path, name):
    path = tmp_path / name
    FORMATS[name](path)
    whole = path.read_bytes()
    said = []
    for seed in range(60):
        path.write_bytes(mutated(whole, seed))
        said.append(refusal(path))
    refused = [text for text in said if text is not None]
    assert len(refused) > 20
    assert all(str(tmp_path) in text and len(text) < 800 for text in refused)


def npz(path, header, method=zipfile.ZIP_STORED):
    """An archive of one array with that header and no numbers."""
    text = header.encode().ljust(117) + b"\n"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)


def test_an_archive_that_claims_more_numbers_than_there_is_memory_for(tmp_path):
    npz(tmp_path / "a.npz", "{'descr': '<f8', 'fortran_order': False, 'shape': (10**12,), }")
    header = "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"
    npz(tmp_path / "b.npz", header)
    for name in "ab":
        with pytest.raises(InputError, match=rf"{name}\.npz is not an archive of plain arrays"):
            read_state(tmp_path / f"{name}.npz")


@pytest.mark.parametrize(("flag", "message"), [(1, "encrypted"), (64, "encryption"), (32, "patch")])
def test_an_encrypted_or_patched_archive_is_refused(tmp_path, flag, message):
    np.savez(tmp_path / "a.npz", **ARRAYS)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + place] |= flag
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(InputError, match=rf"a\.npz is not an archive of plain arrays .*{message}"):
        read_state(tmp_path / "a.npz")


def test_broken_compressed_data_are_refused(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", a=np.arange(300.0))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[60:80] = b"\xff" * 20
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(InputError, match=r"a\.npz is not an archive of plain arrays \(error: Err"):
        read_state(tmp_path / "a.npz")


def test_a_safetensors_shape_beyond_64_bits_is_refused(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}})
    data = len(header).to_bytes(8, "little") + header.encode()
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(InputError, match=r"a\.safetensors is not a whole safetensors file"):
        read_state(tmp_path / "a.safetensors")


@pytest.mark.parametrize("code", [0xD800, 0xDC80, 0])
def test_a_shard_whose_name_no_file_has_is_refused(tmp_path, code):
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": f"{chr(code)}.safetensors"}}))
    with pytest.raises(InputError, match=r"index\.json names the shard .*only safetensors beside"):
        read_state(index)


def nested(levels, ways=1):
    held = {"w": torch.ones(1)}
    for _ in range(levels):
        held = {f"a{i}": held for i in range(ways)}
    return held


def test_a_dictionary_shared_at_every_level_is_entered_once(tmp_path):
    path = tmp_path / "shared.pt"
    torch.save(nested(40, ways=2), path)
    with pytest.raises(InputError, match="holds 2 dictionaries of tensors") as caught:
        read_state(path)
    assert len(str(caught.value)) < 800
    with pytest.raises(InputError, match=r"no tensors under 'b'") as caught:
        read_state(path, "b")
    assert len(str(caught.value)) < 800


def test_many_dictionaries_are_listed_in_part(tmp_path):
    path = tmp_path / "many.pt"
    torch.save({f"{'x' * 1000}{i}": {"w": torch.ones(1)} for i in range(100)}, path)
    with pytest.raises(InputError, match=r"100 dictionaries .* and 88 more\); name one") as caught:
        read_state(path)
    assert len(str(caught.value)) < 2500


def test_the_one_dictionary_is_found_however_deep_it_is():
    held = choose_entry(nested(5_000), None, "deep.pt")
    assert held.keys() == {"w"}


def test_one_array_under_the_ending_of_an_archive_is_refused(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.ones(3))
    (tmp_path / "a.npz").write_bytes(buffer.getvalue())
    with pytest.raises(InputError, match=r"a\.npz is not an archive of plain arrays"):
        read_state(tmp_path / "a.npz")
