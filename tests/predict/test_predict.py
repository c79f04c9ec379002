"""regard predict: rows, formats, resuming, shards, unreadable files, hostile names, refusals."""

import csv
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from regard.errors import InputError, RegardError
from regard.predict import predict as parts_module
from regard.predict import predict as predict_module
from regard.predict.predict import PredictOptions, predict
from regard.predict.predictor import load


def rows_of(path):
    if path.suffix == ".csv":
        with open(path, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    parquet = pytest.importorskip("pyarrow.parquet")
    return parquet.read_table(path).to_pylist()


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
def test_rows_are_what_the_predictor_says(vit_run, pictures, tmp_path, ending):
    folder = Path(next(iter(pictures))).parent
    (folder / "04-broken.jpg").write_bytes(b"\xff\xd8\xff nothing")
    out = tmp_path / f"out{ending}"
    result = predict(PredictOptions(vit_run, (str(folder),), out, top=3, embed=True, batch_size=4))
    rows = rows_of(out)
    assert (result.rows, result.unreadable, result.resumed) == (16, 1, 0)
    assert [row["path"] for row in rows] == sorted([*pictures, str(folder / "04-broken.jpg")])
    read = [row for row in rows if row["path"] in pictures]
    broken = next(row for row in rows if row["path"] not in pictures)
    assert broken["error"]
    assert not broken["class"]
    assert not broken["probability_3"]
    wanted = load(vit_run).predict([row["path"] for row in read])
    features = load(vit_run).embed([row["path"] for row in read])
    for row, one, vector in zip(read, wanted, features, strict=True):
        assert not row["error"]
        for end, (name, probability) in zip(("", "_2", "_3"), one.top(3), strict=True):
            assert row[f"class{end}"] == name
            assert float(row[f"probability{end}"]) == pytest.approx(probability, abs=2e-6)
        held = row["embedding"]
        held = json.loads(held) if isinstance(held, str) else held
        np.testing.assert_allclose(held, vector, rtol=1e-5, atol=1e-5)
    assert not list(tmp_path.glob("out*.parts"))


def test_inputs_of_every_kind(vit_run, pictures, tmp_path):
    folder = Path(next(iter(pictures))).parent
    listed = tmp_path / "list.csv"
    listed.write_text("path,other\npictures/03.png,x\nabsent.png,y\n")
    packed = tmp_path / "packed.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.write(folder / "05.png", "inside/05.png")
        archive.writestr("notes.txt", "none")
    inputs = (
        str(folder / "00.bmp"),
        str(folder / "*.png"),
        str(listed),
        str(packed),
        "digits",
        str(folder),
    )
    out = tmp_path / "out.csv"
    predict(PredictOptions(vit_run, inputs, out, batch_size=100))
    names = [row["path"] for row in rows_of(out)]
    # the folder comes last and adds what the glob did not name; 03.png is listed once
    assert names[:9] == [str(folder / "00.bmp"), *sorted(p for p in pictures if "png" in p),
                         str(tmp_path / "absent.png")]  # fmt: skip
    assert names[9] == "inside/05.png"
    assert names[10:1807] == [f"digits/{i:04d}" for i in range(1797)]
    assert names[1807:] == sorted(p for p in pictures if "bmp" in p and "00" not in p)
    errors = {row["path"]: row["error"] for row in rows_of(out) if row["error"]}
    assert errors == {str(tmp_path / "absent.png"): "No such file or directory"}


def test_shards_without_labels_are_named_too(vit_run, pictures, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    with tarfile.open(tmp_path / "shots.tar", "w") as tar:
        for path in pictures:
            tar.add(path, Path(path).name)
    out = tmp_path / "out.csv"
    predict(PredictOptions(vit_run, (f"stream:{tmp_path / 'shots.tar'}",), out))
    wanted = load(vit_run).predict(list(pictures))
    for i, (row, label) in enumerate(zip(rows_of(out), wanted.labels, strict=True)):
        assert (row["path"], row["class"]) == (f"shots.tar/{i}", label)


def test_names_that_a_spreadsheet_would_run(vit_run, tmp_path, monkeypatch):
    names = ["=cmd()+1.png", "+1.png", "-1.png", "@sum.png", "'quoted.png", 'a,"b.png']
    monkeypatch.chdir(tmp_path)
    for name in names:
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(name)
    predict(PredictOptions(vit_run, tuple(names), Path("out.csv")))
    written = [row["path"] for row in rows_of(Path("out.csv"))]
    assert written == ["'" + name for name in names[:5]] + names[5:]
    predict(PredictOptions(vit_run, tuple(names), Path("out.jsonl")))
    assert [row["path"] for row in rows_of(Path("out.jsonl"))] == names


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
def test_a_killed_job_goes_on(vit_run, tmp_path, monkeypatch, ending):
    whole = tmp_path / f"whole{ending}"
    predict(PredictOptions(vit_run, ("digits",), whole, batch_size=50))
    monkeypatch.setattr(parts_module, "ROWS", 200)
    out = tmp_path / f"out{ending}"
    options = PredictOptions(vit_run, ("digits",), out, batch_size=50)
    best_rows, calls = predict_module.best_rows, []

    def dies(*arguments):
        calls.append(arguments)
        if len(calls) == 10:  # 450 rows are done, 400 of them in parts
            raise KeyboardInterrupt
        return best_rows(*arguments)

    monkeypatch.setattr(predict_module, "best_rows", dies)
    with pytest.raises(KeyboardInterrupt):
        predict(options)
    assert not out.exists()
    monkeypatch.setattr(predict_module, "best_rows", best_rows)
    with pytest.raises(InputError, match="another job"):
        predict(PredictOptions(vit_run, ("digits",), out, batch_size=50, top=2))
    result = predict(options)
    assert result.resumed == 400
    assert rows_of(out) == rows_of(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name, whole.name]


def test_a_job_that_is_killed_outright(vit_run, tmp_path):
    """SIGKILL at any moment, again and again, repeats and loses no row."""
    out = tmp_path / "out.csv"
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from regard.predict import predict\nparts = predict\n"
        "parts.ROWS = 64\n"
        "def say(line):\n"
        "    if sys.argv[1] in line: os.kill(os.getpid(), 9)\n"
        f"predict.predict(predict.PredictOptions(Path({str(vit_run)!r}), ('digits',), "
        f"Path({str(out)!r}), batch_size=32), say)\n"
    )
    for moment, expected in (("640 of", -9), ("1,280 of", -9), ("never", 0)):
        done = subprocess.run([sys.executable, "-c", code, moment], capture_output=True, text=True)
        assert done.returncode == expected, done.stderr
    names = [row["path"] for row in rows_of(out)]
    assert names == [f"digits/{i:04d}" for i in range(1797)]


@pytest.mark.parametrize("world", [2, 3])
def test_shards_hold_every_image_once(vit_run, tmp_path, monkeypatch, world):
    out = tmp_path / "out.csv"
    monkeypatch.setenv("WORLD_SIZE", str(world))
    for rank in range(world):
        monkeypatch.setenv("RANK", str(rank))
        predict(PredictOptions(vit_run, ("digits",), out, batch_size=64))
    shards = sorted(tmp_path.iterdir())
    assert [s.name for s in shards] == [f"out-{r:05d}-of-{world:05d}.csv" for r in range(world)]
    names = [row["path"] for shard in shards for row in rows_of(shard)]
    assert names == [f"digits/{i:04d}" for i in range(1797)]
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InputError, match="another number of processes"):
        predict(PredictOptions(vit_run, ("digits",), out))


def test_workers_change_nothing(vit_run, pictures, tmp_path):
    for workers in (0, 2):
        out = tmp_path / f"{workers}.csv"
        predict(PredictOptions(vit_run, tuple(pictures), out, batch_size=4, workers=workers))
    assert (tmp_path / "0.csv").read_bytes() == (tmp_path / "2.csv").read_bytes()


def test_extreme_sizes(vit_run, tmp_path):
    Image.fromarray(np.full((1, 1), 77, np.uint8)).save(tmp_path / "1.png")
    # 30,000 × 30,000 pixels as a header alone: refused before anything is decoded
    raw = bytearray((tmp_path / "1.png").read_bytes())
    raw[16:24] = (30_000).to_bytes(4, "big") * 2
    raw[29:33] = zlib.crc32(bytes(raw[12:29])).to_bytes(4, "big")
    (tmp_path / "2.png").write_bytes(raw)
    out = tmp_path / "out.csv"
    predict(PredictOptions(vit_run, (str(tmp_path / "*.png"),), out))
    one, huge = rows_of(out)
    assert one["class"]
    assert not one["error"]
    assert "over the limit of 178,956,970 pixels" in huge["error"]


def test_refusals(vit_run, pictures, tmp_path):
    picture = next(iter(pictures))
    out = tmp_path / "out.csv"
    out.write_text("mine")
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "no.csv").write_text("file\nx.png\n")
    cases = [
        ((picture,), tmp_path / "out.xlsx", "ending '.xlsx'"),
        ((picture,), out, "exists already"),
        ((str(empty),), tmp_path / "a.csv", "holds no pictures"),
        ((str(tmp_path / "*.jpeg"),), tmp_path / "a.csv", "holds no pictures"),
        ((str(tmp_path / "absent"),), tmp_path / "a.csv", "does not exist"),
        ((str(tmp_path / "no.csv"),), tmp_path / "a.csv", "has the columns file"),
        ((), tmp_path / "a.csv", "no images were given"),
        ((picture,), tmp_path / "absent" / "a.csv", "is no folder"),
    ]
    for inputs, where, words in cases:
        with pytest.raises(InputError, match=re.escape(words)):
            predict(PredictOptions(vit_run, inputs, where))
    assert out.read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "no.csv", "out.csv", "pictures"]
    predict(PredictOptions(vit_run, (picture,), out, force=True))
    assert len(rows_of(out)) == 1


def test_a_full_disk_is_said(vit_run, pictures, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device", "out.csv")

    monkeypatch.setattr(parts_module.Parts, "flush", full)
    with pytest.raises(RegardError, match=r"No space left on device.*the same command goes on"):
        predict(PredictOptions(vit_run, tuple(pictures), tmp_path / "out.csv"))
    assert os.listdir(tmp_path / "out.csv.parts")
