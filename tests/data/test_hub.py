import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from regard.data.decode import UnreadableImage
from regard.data.open import open_data
from regard.errors import InputError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def encoded(value):
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4), (value, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def table(count, names=("zebra", "ant"), broken=None, label="label", classes=True):
    rows = [b"torn" if i == broken else encoded(i) for i in range(count)]
    kind = datasets.ClassLabel(names=list(names)) if classes else datasets.Value("string")
    labels = [i % 2 if classes else names[i % 2] for i in range(count)]
    features = datasets.Features({"picture": datasets.Image(), label: kind})
    stored = {"picture": [{"bytes": raw, "path": None} for raw in rows], label: labels}
    return datasets.Dataset.from_dict(stored, features=features)


def check(data, split, row, value, label):
    assert data.splits[split].read(row)[0].eq(value).all()
    assert data.classes[data.splits[split].labels[row]] == label


def test_a_saved_data_set_with_splits_and_a_broken_row(tmp_path):
    saved = {"train": table(8, broken=5), "validation": table(4), "extra": table(2)}
    datasets.DatasetDict(saved).save_to_disk(tmp_path / "saved")
    data = open_data(f"hf:{tmp_path / 'saved'}")
    assert data.classes == ("ant", "zebra")
    assert {title: len(split) for title, split in data.splits.items()} == {"train": 8, "val": 4}
    assert "the split 'extra' is not used: only train, val and test are" in data.notes
    check(data, "train", 2, 2, "zebra")
    check(data, "train", 7, 7, "ant")
    check(data, "val", 3, 3, "ant")
    with pytest.raises(UnreadableImage, match=r"train/5 cannot be read: no known picture"):
        data.splits["train"].read(5)


def test_a_parquet_file_is_split_by_seed(tmp_path):
    table(20).to_parquet(tmp_path / "shard.parquet")
    data = open_data(f"hf:{tmp_path / 'shard.parquet'}", val_fraction=0.2)
    assert {title: len(split) for title, split in data.splits.items()} == {"train": 16, "val": 4}
    row = int(data.splits["val"].name(0).removeprefix("train/"))
    check(data, "val", 0, row, ("zebra", "ant")[row % 2])


def test_an_image_folder_and_string_labels(make_folder, tmp_path):
    root = make_folder(train__ant=4, train__bee=4, test__ant=2, test__bee=2)
    data, folder = open_data(f"hf:{root}"), open_data(root)
    assert data.classes == folder.classes == ("ant", "bee")
    assert len(data.splits["test"]) == 4
    mine = {data.splits["test"].read(i).numpy().tobytes() for i in range(4)}
    assert mine == {folder.splits["test"].read(i).numpy().tobytes() for i in range(4)}
    table(8, classes=False).save_to_disk(tmp_path / "strings")
    assert open_data(f"hf:{tmp_path / 'strings'}").classes == ("ant", "zebra")


def test_a_tar_of_webdataset(tmp_path):
    shard = tmp_path / "shard-000.tar"
    with tarfile.open(shard, "w") as tar:
        for i in range(8):
            for ending, body in (("png", encoded(i)), ("cls", str(i % 2).encode())):
                member = tarfile.TarInfo(f"{i:04d}.{ending}")
                member.size = len(body)
                tar.addfile(member, io.BytesIO(body))
    data = open_data(f"hf:{shard}")
    assert data.classes == ("0", "1")
    values = sorted(
        int(split.read(i)[0, 0, 0]) for split in data.splits.values() for i in range(len(split))
    )
    assert values == list(range(8))
    for split in data.splits.values():
        found = [int(split.read(i)[0, 0, 0]) % 2 for i in range(len(split))]
        assert np.array_equal(found, split.labels)


def test_what_cannot_be_used_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"hf:.*gone cannot be loaded"):
        open_data(f"hf:{tmp_path / 'gone'}")
    table(4, label="kind", classes=False).save_to_disk(tmp_path / "unlabelled")
    with pytest.raises(InputError, match="has 0 columns of labels among picture"):
        open_data(f"hf:{tmp_path / 'unlabelled'}")
    table(4).remove_columns("picture").save_to_disk(tmp_path / "blind")
    with pytest.raises(InputError, match="has 0 columns of pictures among label"):
        open_data(f"hf:{tmp_path / 'blind'}")
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(InputError, match=r"is no \.parquet, \.arrow, \.tar file"):
        open_data(f"hf:{tmp_path / 'a.csv'}")
