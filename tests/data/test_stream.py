"""Streaming shards: the same batches however they are made, and no more on the disk than said."""

import io
import itertools
import os
import shutil
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from regard.data import streaming as remote_module
from regard.data import streaming as shards_module
from regard.data import streaming as stream_module
from regard.data.augment import Augment
from regard.data.batches import TrainBatches, eval_batches
from regard.data.counter_rng import windowed
from regard.data.decode import UnreadableImage
from regard.data.inspection import inspect_data
from regard.data.memory_cache import remember
from regard.data.open import open_data
from regard.data.preprocess import Preprocess, pixel_statistics
from regard.data.streaming import BlockCache
from regard.errors import InputError, RegardError

datasets = pytest.importorskip("datasets")
parquet = pytest.importorskip("pyarrow.parquet")

ALL = Augment((0.4, 1.0), (), "random", 1, 0.5, 0.3, 1.0)
PRE = Preprocess((4, 5))
WINDOW = 20


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "regard"))
    monkeypatch.setattr(stream_module, "WINDOW", WINDOW)


def encoded(value):
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4), (value, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(path, values, group=5, classes=True):
    """Row groups of `group` pictures; picture i is i red, its class zebra where i is odd."""
    kind = datasets.ClassLabel(names=["ant", "zebra"]) if classes else datasets.Value("string")
    features = datasets.Features({"picture": datasets.Image(), "label": kind})
    stored = {
        "picture": [{"bytes": encoded(v), "path": None} for v in values],
        "label": [v % 2 if classes else ("ant", "zebra")[v % 2] for v in values],
    }
    table = datasets.Dataset.from_dict(stored, features=features)
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(path, batch_size=group)


def write_tar(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for v in values:
            for ending, body in (("png", encoded(v)), ("cls", b"%d" % (v % 2)), ("json", b"{}")):
                member = tarfile.TarInfo(f"shots/{v:04d}.{ending}")
                member.size = len(body)
                tar.addfile(member, io.BytesIO(body))


@pytest.fixture(params=["parquet", "tar"])
def shards(request, tmp_path):
    """Four training shards and one to hold out: 80 pictures and 12."""
    write = {"parquet": write_parquet, "tar": write_tar}[request.param]
    for s in range(4):
        write(tmp_path / f"set/train-{s:03d}.{request.param}", range(20 * s, 20 * s + 20))
    write(tmp_path / f"set/validation-000.{request.param}", range(100, 112))
    return f"stream:{tmp_path / 'set'}"


def equal(one, two):
    return one.unreadable == two.unreadable and all(
        torch.equal(getattr(one, name), getattr(two, name))
        for name in ("images", "targets", "labels", "weights", "indices")
    )


def values_of(split):
    return [int(split.read(i)[0, 0, 0]) for i in range(len(split))]


def test_the_order_is_a_permutation_within_a_window():
    draws = np.random.default_rng(0)
    blocks = np.repeat(np.arange(50), draws.integers(1, 12, 50))
    n = len(blocks)
    for window in (0, 30, 10 * n):
        order = windowed(blocks, window, 1, 2)
        assert sorted(order.tolist()) == list(range(n))
        walked = blocks[order]
        met = list(dict.fromkeys(walked.tolist()))
        begins = dict(zip(*np.unique(walked, return_index=True), strict=True))
        lasts = {b: n - 1 - int(np.argmax(walked[::-1] == b)) for b in met}
        largest = np.bincount(blocks).max()
        for b in met:
            assert lasts[b] - begins[b] < window + largest
        in_use = [sum(begins[b] <= t <= lasts[b] for b in met) for t in range(n)]
        if window == 0:
            assert max(in_use) == 1
            assert met != sorted(met)
        if window == 30:
            assert max(np.bincount(blocks)) < 30  # several blocks make a window
            assert 3 < np.mean(in_use) < 12
    assert not np.array_equal(windowed(blocks, 30, 1, 2), windowed(blocks, 30, 1, 3))
    assert not np.array_equal(windowed(blocks, 30, 1, 2), windowed(blocks, 30, 2, 2))


def test_what_is_read_is_what_is_stored(shards):
    data = open_data(shards)
    assert data.classes in (("ant", "zebra"), ("0", "1"))
    assert values_of(data.splits["train"]) == list(range(80))
    assert values_of(data.splits["val"]) == list(range(100, 112))
    assert data.splits["train"].labels.tolist() == [i % 2 for i in range(80)]
    assert data.splits["train"].name(21).startswith("train-001.")
    assert data.splits["train"].name(21).endswith("/1")
    assert data.notes[0].startswith("streamed: 92 pictures in ")
    assert open_data(shards).fingerprint == data.fingerprint


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_processes_and_first_steps_change_nothing(shards):
    split = open_data(shards).splits["train"]
    arguments = {"batch_size": 12, "microbatch": 3, "seed": 3}
    here = TrainBatches(split, PRE, ALL, **arguments)
    wanted = [here.at(step) for step in range(9)]
    met = torch.cat([batch.indices for batch in wanted])[:80]
    assert sorted(met.tolist()) == list(range(80))
    for workers in (1, 3):
        there = TrainBatches(split, PRE, ALL, **arguments, workers=workers)
        assert all(
            equal(*pair)
            for pair in zip(itertools.islice(there.start(2), 7), wanted[2:], strict=True)
        )
    for world in (2, 4):
        for step in (7, 0, 4):
            parts = [
                TrainBatches(split, PRE, ALL, **arguments, rank=rank, world=world).at(step)
                for rank in range(world)
            ]
            for name in ("images", "targets", "labels", "weights", "indices"):
                together = torch.cat([getattr(part, name) for part in parts])
                assert torch.equal(together, getattr(wanted[step], name))
    val = open_data(shards).splits["val"]
    evaluated = [
        i for r in (0, 1) for batch in eval_batches(val, PRE, batch_size=5, rank=r, world=2)
        for i in batch.indices.tolist()
    ]  # fmt: skip
    assert sorted(evaluated) == list(range(12))


def test_no_more_lies_on_the_disk_than_the_budget(tmp_path, monkeypatch):
    write_parquet(tmp_path / "set/train.parquet", range(100))
    write_parquet(tmp_path / "set/test.parquet", range(100, 104))
    data = open_data(f"stream:{tmp_path / 'set'}", val_fraction=0.2)
    source = data.splits["train"].source
    wanted = values_of(data.splits["train"])
    whole = source.cache.used()
    source.cache = BlockCache(tmp_path / "small", whole // 3)
    batches = TrainBatches(data.splits["train"], PRE, batch_size=8)
    fetched = []
    fetch = shards_module.Shard.fetch
    monkeypatch.setattr(
        shards_module.Shard,
        "fetch",
        lambda self, block: fetched.append(block) or fetch(self, block),
    )
    stale, fresh = (source.cache.folder / f".{n}.block.x.part" for n in "ab")
    source.cache.folder.mkdir()
    for part in (stale, fresh):
        part.write_bytes(b"cut short")
    os.utime(stale, (0, 0))
    for step in range(10):
        batches.at(step)
        assert source.cache.used() <= whole // 3
    assert len(fetched) == len(set(fetched)) == 16  # an epoch of 80 reads each block once
    assert values_of(data.splits["train"]) == wanted
    assert list((tmp_path / "small").glob(".*.part")) == [fresh]


def test_whole_blocks_are_held_out_where_no_split_is_given(tmp_path):
    write_parquet(tmp_path / "set/train.parquet", range(100), classes=False)
    data = open_data(f"stream:{tmp_path / 'set'}", val_fraction=0.2)
    assert {title: len(split) for title, split in data.splits.items()} == {"train": 80, "val": 20}
    blocks = {title: set((split.items // 5).tolist()) for title, split in data.splits.items()}
    assert not blocks["train"] & blocks["val"]
    assert "20 pictures in whole blocks are held out, as no val split is given" in data.notes
    record = data.record()
    assert record["window"] == WINDOW
    again = open_data(
        f"stream:{tmp_path / 'set'}", record={**record, "window": 7}, val_fraction=0.5
    )
    assert again.splits["val"].items.tolist() == data.splits["val"].items.tolist()
    assert again.splits["train"].source.window == 7
    write_parquet(tmp_path / "one/train.parquet", range(8), group=8)
    with pytest.raises(InputError, match="has 1 blocks, none of which can be held out"):
        open_data(f"stream:{tmp_path / 'one'}")


def test_bad_rows_weigh_nothing_and_lost_shards_stop_the_run(tmp_path):
    path = tmp_path / "set/train.parquet"
    features = datasets.Features({"picture": datasets.Image(), "label": datasets.Value("string")})
    rows = [encoded(i) for i in range(6)]
    rows[1], rows[4] = b"torn", None
    stored = {"picture": [r and {"bytes": r, "path": None} for r in rows], "label": list("ababab")}
    path.parent.mkdir()
    table = datasets.Dataset.from_dict(stored, features=features)
    table.to_parquet(path, batch_size=3)
    table.to_parquet(path.with_name("validation.parquet"), batch_size=3)
    data = open_data(f"stream:{path.parent}")
    batch = TrainBatches(data.splits["train"], PRE, batch_size=6).at(0)
    assert {(name, reason[:20]) for _, name, reason in batch.unreadable} == {
        ("train.parquet/1", "no known picture for"),
        ("train.parquet/4", "the row holds no pic"),
    }
    found = inspect_data(data, cache=None)
    assert len(found.unreadable) == 4
    source = data.splits["train"].source
    shutil.rmtree(source.cache.folder)
    path.unlink()
    with pytest.raises(RegardError, match=r"train\.parquet cannot be read .* the same command"):
        data.splits["train"].read(0)


def test_a_damaged_row_group_is_named(tmp_path):
    path = tmp_path / "train.parquet"
    write_parquet(path, range(20))
    raw = bytearray(path.read_bytes())
    place = parquet.read_metadata(path).row_group(2).column(0).data_page_offset
    raw[place : place + 8] = b"\xff" * 8
    path.write_bytes(raw)
    data = open_data(f"stream:{path}", val_fraction=0.2)
    whole, bad = [], []
    for split in data.splits.values():
        for i in range(len(split)):
            try:
                whole.append(int(split.read(i)[0, 0, 0]))
            except UnreadableImage as error:
                bad.append(error)
    assert sorted(whole) == [i for i in range(20) if not 10 <= i < 15]
    assert {error.reason.split(" (")[0] for error in bad} == {"the shard is damaged"}


def test_statistics_and_samples_read_few_blocks(tmp_path):
    write_parquet(tmp_path / "set/train.parquet", range(100))
    write_parquet(tmp_path / "set/test.parquet", range(4))
    split = open_data(f"stream:{tmp_path / 'set'}", val_fraction=0.2).splits["train"]
    chosen = split.sample(10)
    assert len(chosen) == 10
    assert len(set((split.items[chosen] // 5).tolist())) == 2
    mean, _ = pixel_statistics(split, 10)
    red = np.mean([split.read(int(i))[0, 0, 0] for i in chosen])
    assert mean[0] == pytest.approx(red / 255)
    assert sorted(split.sample(1000).tolist()) == list(range(80))


def test_streams_are_not_kept_in_memory(tmp_path):
    write_parquet(tmp_path / "set/train.parquet", range(20))
    data = open_data(f"stream:{tmp_path / 'set'}")
    held = remember(data)
    assert held.notes[-1] == "streamed pictures are not kept in memory"
    assert held.splits["train"].source is data.splits["train"].source
    assert data.splits["train"].source.cache.used() == 0


def test_shards_behind_a_url_are_read_a_block_at_a_time(tmp_path, monkeypatch):
    """fsspec's in-memory file system stands for one on a network, that fails now and then."""
    fsspec = pytest.importorskip("fsspec")
    write_parquet(tmp_path / "a.parquet", range(20))
    write_tar(tmp_path / "a.tar", range(20))
    system = fsspec.filesystem("memory")
    monkeypatch.setattr(shards_module, "_TAR_BLOCK", 10_000)
    monkeypatch.setattr(remote_module.time, "sleep", lambda seconds: None)
    plain, calls = shards_module.open_url, itertools.count()

    def fails_often(url):
        if next(calls) % 2 == 0:
            raise ConnectionError("no route to host")
        return plain(url)

    monkeypatch.setattr(shards_module, "open_url", fails_often)
    for ending in ("parquet", "tar"):
        url = f"memory://shards/a.{ending}"
        system.pipe(url, (tmp_path / f"a.{ending}").read_bytes())
        monkeypatch.setattr(
            stream_module, "_resolve", lambda name, url=url: ([("train", url)], None)
        )
        data = open_data("stream:a", val_fraction=0.3)
        met = [v for split in data.splits.values() for v in values_of(split)]
        assert sorted(met) == list(range(20))
        source = data.splits["train"].source
        assert len(list(source.cache.folder.glob("*.block"))) >= 4
        system.rm(url)
        assert values_of(data.splits["val"])  # from the disk
        shutil.rmtree(source.cache.folder)
        with pytest.raises(RegardError, match="cannot be read"):
            data.splits["val"].read(0)


def test_what_cannot_be_streamed_is_refused(tmp_path, make_folder, monkeypatch):
    write_parquet(tmp_path / "set/train.parquet", range(20))
    monkeypatch.setenv("REGARD_STREAM_GB", "0.000001")
    with pytest.raises(InputError, match="in use at a time, more than the budget of 1 kB; set"):
        open_data(f"stream:{tmp_path / 'set'}")
    for bad in ("0", "much", "nan"):
        monkeypatch.setenv("REGARD_STREAM_GB", bad)
        with pytest.raises(InputError, match="give a number of gigabytes above 0"):
            open_data(f"stream:{tmp_path / 'set'}")
    monkeypatch.delenv("REGARD_STREAM_GB")
    with pytest.raises(InputError, match=r"has \.png files in its splits; Parquet or tar"):
        open_data(f"stream:{make_folder(a=2, b=2)}")
    with pytest.raises(InputError, match=r"stream:.*gone cannot be loaded"):
        open_data(f"stream:{tmp_path / 'gone'}")
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(InputError, match=r"is no \.parquet or \.tar file"):
        open_data(f"stream:{tmp_path / 'a.csv'}")
    (tmp_path / "bad/train.parquet").parent.mkdir()
    (tmp_path / "bad/train.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match="is not a whole Parquet file"):
        open_data(f"stream:{tmp_path / 'bad/train.parquet'}")
    (tmp_path / "a.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(InputError, match="is not a whole tar file"):
        open_data(f"stream:{tmp_path / 'a.tar'}")
    with tarfile.open(tmp_path / "b.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("a.png"))
    with pytest.raises(InputError, match=r"b\.tar has no label in row 0"):
        open_data(f"stream:{tmp_path / 'b.tar'}")


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    write_parquet(tmp_path / "set/train.parquet", range(20))
    data = open_data(f"stream:{tmp_path / 'set'}")

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("regard.data.streaming.block_of", full)
    with pytest.raises(RegardError, match=r"cannot hold a block .*No space left on device"):
        data.splits["train"].read(0)
    assert os.listdir(data.splits["train"].source.cache.folder)
