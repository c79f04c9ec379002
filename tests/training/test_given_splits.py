"""Runs on data with splits of its own: evaluated, resumed and reopened from the folder alone."""

import json
import zipfile

import numpy as np
import pytest

from regard.data.open import open_data
from regard.data.splits import check_shape
from regard.errors import InputError
from regard.training.config import TrainConfig
from regard.training.evaluate import evaluate
from regard.training.run_folder import RunFolder
from regard.training.trainer import train
from tests.training.conftest import tiny_config

SPLITS = {"train": 6, "val": 3, "test": 2}


def quiet(line):
    pass


@pytest.fixture
def split_folder(tmp_path):
    """train/, val/ and test/, each with two classes of PNGs, noise of two brightnesses."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    root = tmp_path / "data"
    for title, count in SPLITS.items():
        for number, name in enumerate(("cat", "dog")):
            (root / title / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 100, (16, 16)) + 140 * number
                image.fromarray(pixels.astype(np.uint8)).save(root / title / name / f"{i}.png")
    return root


def as_folder(root):
    return root


def as_zip(root):
    with zipfile.ZipFile(root.with_suffix(".zip"), "w") as archive:
        for path in sorted(root.rglob("*.png")):
            archive.write(path, path.relative_to(root))
    return root.with_suffix(".zip")


def as_manifest(root):
    rows = [
        f"{path.relative_to(root)},{path.parent.name},{path.parent.parent.name}"
        for path in sorted(root.rglob("*.png"))
    ]
    (root / "list.csv").write_text("\n".join(["path,label,split", *rows]))
    return root / "list.csv"


@pytest.mark.parametrize("kind", [as_folder, as_zip, as_manifest])
def test_given_splits_last_as_long_as_the_run(kind, split_folder, tmp_path):
    data = kind(split_folder)
    out = tmp_path / "run"
    result = train(tiny_config(out, data=str(data), steps=4, batch_size=4), say=quiet)
    assert json.loads((out / "split.json").read_text())["made"] == "given"
    assert {t: len(s) for t, s in RunFolder(out).data().splits.items()} == {
        title: 2 * count for title, count in SPLITS.items()
    }
    again = evaluate(out)
    assert (again.split, len(again.labels)) == ("test", 4)
    assert np.array_equal(again.probabilities, result.evaluation.probabilities)
    assert np.ptp(again.probabilities) > 0
    assert len(evaluate(out, split="val").labels) == 6
    resumed = train(TrainConfig(str(data), out=out, resume=True, steps=6), say=quiet)
    assert resumed.evaluation.names == again.names


@pytest.mark.parametrize(
    "change", [{"made": "guessed"}, {"made": "seeded"}, {"classes": [1, 2]}, {"fingerprint": None}]
)
def test_a_given_record_that_was_changed_is_none(change, split_folder):
    record = open_data(split_folder).record()
    check_shape(record)
    with pytest.raises((KeyError, TypeError, ValueError)):
        check_shape({**record, **change})


def test_given_splits_that_changed_are_refused(split_folder, tmp_path):
    out = tmp_path / "run"
    train(tiny_config(out, data=str(split_folder), steps=2, batch_size=4), say=quiet)
    (split_folder / "val" / "cat" / "0.png").unlink()
    with pytest.raises(InputError, match="has changed since its split was made"):
        evaluate(out)
