"""Damaged runs and requests that cannot be meant: refused by name, with exit code 2."""

import json
import os
import shutil

import pytest

from regard.__main__ import run as command
from regard.errors import InputError
from regard.training.config import TrainConfig
from regard.training.evaluate import evaluate
from regard.training.run_folder import RunFolder
from regard.training.trainer import train
from tests.training.conftest import tiny_config


def quiet(line):
    pass


def picture_folder(path, count=12):
    """Two classes of grey PNGs."""
    image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(("cat", "dog")):
        (path / name).mkdir(parents=True)
        for i in range(count):
            image.new("L", (16, 16), 100 * number + i).save(path / name / f"{i}.png")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("damage") / "run"
    train(tiny_config(path, steps=4), say=quiet)
    return path


@pytest.fixture
def broken(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def resume(folder):
    train(TrainConfig("digits", out=folder, resume=True, steps=6), say=quiet)


def last(folder):
    return RunFolder(folder).checkpoint(RunFolder(folder).saved_steps()[-1])


def cut(path):
    path.write_bytes(path.read_bytes()[:-50])


DAMAGE = {
    "half a checkpoint": lambda f: cut(last(f) / "state.safetensors"),
    "an empty checkpoint": lambda f: (last(f) / "state.safetensors").write_bytes(b""),
    "an odd progress": lambda f: (last(f) / "progress.json").write_text("[]"),
    "a progress of words": lambda f: (last(f) / "progress.json").write_text('{"step": "x"}'),
    "a progress of nothing": lambda f: (last(f) / "progress.json").write_text("{}"),
    "a progress with half a step": lambda f: (last(f) / "progress.json").write_text(
        json.dumps({**json.loads((last(f) / "progress.json").read_text()), "step": 3.5})
    ),
    "a bad line of metrics": lambda f: (f / "metrics.jsonl").write_text('nothing\n{"step": 1}\n'),
    "a line without step": lambda f: (f / "metrics.jsonl").write_text("{}\n"),
    "an empty split": lambda f: (f / "split.json").write_text("{}"),
    "a split without val": lambda f: (f / "split.json").write_text(
        json.dumps({**json.loads((f / "split.json").read_text()), "val": None})
    ),
    "a split that holds nothing out": lambda f: (f / "split.json").write_text(
        json.dumps({**json.loads((f / "split.json").read_text()), "val": ["nope"]})
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_run_is_not_resumed_and_the_file_is_named(what, broken):
    DAMAGE[what](broken)
    with pytest.raises(InputError, match=r"state\.safetensors|step-|progress|metrics|split"):
        resume(broken)


def test_other_folders_among_the_checkpoints_are_none(broken):
    before = RunFolder(broken).saved_steps()
    (broken / "checkpoint" / "step-backup").mkdir()
    (broken / "checkpoint" / "step-000000002 copy").mkdir()
    assert RunFolder(broken).saved_steps() == before
    resume(broken)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        ((), None), ((), []), (("recipe",), None), (("recipe", "steps"), "3"),
        (("recipe", "image_size"), 16), (("recipe", "augment"), None), (("classes",), None),
        (("segments",), None), (("model",), None), (("notes",), None),
    ],
)  # fmt: skip
def test_a_config_of_another_shape_is_refused(keys, value, broken):
    file = broken / "config.json"
    whole = values = json.loads(file.read_text())
    for name in keys[:-1]:
        values = values[name]
    if keys:
        values[keys[-1]] = value
    file.write_text(json.dumps(whole if keys else value))
    with pytest.raises(InputError, match=r"config\.json"):
        evaluate(broken)


def test_weights_of_another_model_are_refused(broken):
    file = broken / "config.json"
    values = json.loads(file.read_text())
    values["model"]["depth"] += 1
    file.write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"weights of another model than config\.json describes"):
        evaluate(broken)


def test_a_list_of_what_is_left_out_must_be_there(tmp_path):
    data = picture_folder(tmp_path / "data")
    train(tiny_config(tmp_path / "run", data=str(data), steps=2, batch_size=8), say=quiet)
    (tmp_path / "run" / "quarantine.json").unlink()
    with pytest.raises(InputError, match=r"quarantine\.json is missing, which names the pictures"):
        train(TrainConfig(str(data), out=tmp_path / "run", resume=True, steps=3), say=quiet)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "simple-vit-ti/4"}, "gives name, which --model decides"),
        ({"num_classes": 12}, "gives num_classes, which the data decides"),
        ({"image_size": 32}, "gives image_size, which --image-size decides"),
        ({"test_flips": True}, "gives test_flips, which --test-flips decides"),
    ],
)
def test_options_that_something_else_decides(options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        train(tiny_config(tmp_path / "run", model_options=options), say=quiet)
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_first_size_the_patch_does_not_divide(tmp_path):
    with pytest.raises(InputError, match="start_size is 3 5; this model takes multiples of"):
        train(tiny_config(tmp_path / "run", start_size=(3, 5)), say=quiet)


def test_a_run_is_not_put_among_its_pictures(tmp_path):
    data = picture_folder(tmp_path / "data")
    for out in (data / "run", data / "cat" / "run", tmp_path / "x" / ".." / "data" / "run"):
        with pytest.raises(InputError, match="lies in the training data"):
            train(tiny_config(out, data=str(data), steps=2), say=quiet)
        assert not out.exists()


LARGE = (
    "--epochs 1e308", "--minutes 1e308", "--eval-every 1e308", "--memory 1e300", "--lr 1e300",
    "--shift 99999999999999999999999", "--randaugment 100000000000 5",
)  # fmt: skip


@pytest.mark.parametrize("given", LARGE)
def test_numbers_beyond_all_measure(given, tmp_path, capsys):
    line = ["train", "digits", "--out", str(tmp_path / "run"), *given.split()]
    assert command(line) == 2
    assert given.split()[0].removeprefix("--").replace("-", "_") in capsys.readouterr().err


def test_a_file_where_a_folder_is_needed_is_bad_input(trained, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("kept")
    for line in (
        ["train", "digits", "--out", str(file / "x"), "--steps", "1"],
        ["eval", str(trained), "--out", str(file / "x")],
        ["inspect", "digits", "--out", str(file)],
        ["study", "digits", "--quick", "--out", str(file / "x")],
        ["train", "digits", "--out", str(tmp_path / ("n" * 300))],
    ):
        assert command(line) == 2, line
        assert "Traceback" not in capsys.readouterr().err
    assert file.read_text() == "kept"


@pytest.mark.skipif(os.name != "posix", reason="names are bytes on POSIX systems only")
def test_a_folder_whose_name_is_not_utf_8_is_refused_before_training(tmp_path):
    out = os.fsdecode(os.fsencode(tmp_path) + b"/r\xff")
    with pytest.raises(InputError, match="is no name in UTF-8"):
        train(tiny_config(out), say=quiet)


def test_a_link_to_nothing_is_no_place_for_a_run(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match="run is a link to nothing; remove it"):
        train(tiny_config(tmp_path / "run"), say=quiet)


def test_no_data_at_all_is_not_the_folder_one_is_in(tmp_path, monkeypatch):
    monkeypatch.chdir(picture_folder(tmp_path / "data"))
    with pytest.raises(InputError, match="no DATA came"):
        train(tiny_config(tmp_path / "run", data=""), say=quiet)


def test_a_study_that_cannot_run_leaves_nothing(tmp_path):
    assert command(["study", "digits", "--workers", "0", "--out", str(tmp_path / "s")]) == 2
    assert not (tmp_path / "s").exists()


def test_a_pipe_is_no_picture(trained, tmp_path, capsys):
    line = ["look", str(trained), "/dev/zero", "--out", str(tmp_path / "look")]
    assert command(line) == 2
    assert "pipe or a device" in capsys.readouterr().err
