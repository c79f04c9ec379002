import csv
import os
import zipfile

import numpy as np
import pytest
from PIL import Image

from regard.data.decode import UnreadableImage
from regard.data.open import open_data
from regard.data.preprocess import pixel_statistics
from regard.errors import InputError


def names(split):
    return [split.name(i) for i in range(len(split))]


def test_digits_are_scikit_learns():
    datasets = pytest.importorskip("sklearn.datasets")
    bunch = datasets.load_digits()
    data = open_data("digits")
    assert data.classes == tuple("0123456789")
    assert data.channels == 1
    train, val = data.splits["train"], data.splits["val"]
    assert len(train) + len(val) == 1797
    for split in (train, val):
        for i in (0, 5, len(split) - 1):
            number = int(split.name(i).removeprefix("digits/"))
            expected = [[round(255 * v / 16) for v in row] for row in bunch.images[number].tolist()]
            assert split.read(i)[0].tolist() == expected
            assert data.classes[split.labels[i]] == str(bunch.target[number])
    assert open_data("digits", channels=3).splits["train"].read(0).shape == (3, 8, 8)


def test_class_folders_alone_are_split_stratified_and_by_seed(make_folder):
    root = make_folder(cat=20, dog=10, emu=2)
    data = open_data(root, val_fraction=0.2)
    train, val = data.splits["train"], data.splits["val"]
    assert data.classes == ("cat", "dog", "emu")
    assert np.bincount(val.labels).tolist() == [4, 2, 1]
    assert np.bincount(train.labels).tolist() == [16, 8, 1]
    assert not set(names(train)) & set(names(val))
    assert all(
        data.classes[label] == name.split("/")[0]
        for label, name in zip(val.labels, names(val), strict=True)
    )
    assert names(open_data(root, val_fraction=0.2).splits["val"]) == names(val)
    assert names(open_data(root, val_fraction=0.2, seed=1).splits["val"]) != names(val)


def test_removing_a_file_moves_few_others(make_folder):
    root = make_folder(cat=40, dog=40)
    before = set(names(open_data(root).splits["val"]))
    (root / "cat/07.png").unlink()
    after = set(names(open_data(root).splits["val"]))
    assert len(before ^ after) <= 2


def test_given_splits_are_kept_and_classes_matched_by_name(make_folder):
    root = make_folder(
        train__b=2, train__a=3, train__c=1, Validation__b=2, Validation__c=1, test__a=1
    )
    data = open_data(root)
    assert {title: len(split) for title, split in data.splits.items()} == {
        "train": 6,
        "val": 3,
        "test": 1,
    }
    assert data.splits["val"].labels.tolist() == [1, 1, 2]
    assert "the val split lacks 1 of the classes: 'a'" in data.notes
    assert data.record()["made"] == "given"


def test_a_train_folder_without_val_is_split(make_folder):
    data = open_data(make_folder(train__a=10, train__b=10, test__a=2, test__b=2))
    assert {title: len(split) for title, split in data.splits.items()} == {
        "train": 18,
        "val": 2,
        "test": 4,
    }


def test_a_record_brings_the_same_splits_back_and_refuses_changed_data(make_folder):
    root = make_folder(cat=12, dog=12)
    first = open_data(root, seed=5, val_fraction=0.25)
    again = open_data(root, record=first.record())
    for title in ("train", "val"):
        assert names(again.splits[title]) == names(first.splits[title])
        assert again.splits[title].labels.tolist() == first.splits[title].labels.tolist()
    assert again.record() == first.record()
    Image.new("L", (3, 3)).save(root / "cat/new.png")
    with pytest.raises(InputError, match="has changed since its split was made"):
        open_data(root, record=first.record())
    (root / "emu").mkdir()
    for i in range(2):
        Image.new("L", (3, 3)).save(root / f"emu/{i}.png")
    with pytest.raises(InputError, match="the split on record was made for 'cat', 'dog'"):
        open_data(root, record=first.record())


def test_a_zip_gives_what_the_folder_gives(make_folder, tmp_path):
    root = make_folder(cat=6, dog=6)
    for wrap in ("", "pets/"):
        archive = tmp_path / f"{wrap.strip('/') or 'bare'}.zip"
        with zipfile.ZipFile(archive, "w") as opened:
            for path in sorted(root.rglob("*.png")):
                opened.write(path, wrap + str(path.relative_to(root)))
            opened.writestr("__MACOSX/cat/._00.png", b"junk")
        data, folder = open_data(archive), open_data(root)
        assert data.classes == folder.classes
        by_name = {
            f"{wrap}{split.name(i)}": split.read(i)
            for split in folder.splits.values()
            for i in range(len(split))
        }
        for split in data.splits.values():
            for i in range(len(split)):
                assert (split.read(i) == by_name.pop(split.name(i))).all()
        assert not by_name


def test_a_damaged_zip_member_is_unreadable(make_folder, tmp_path):
    root = make_folder(cat=3, dog=3)
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        for path in sorted(root.rglob("*.png")):
            opened.write(path, path.relative_to(root))
    raw = bytearray(archive.read_bytes())
    raw[raw.index(b"IDAT") + 6] ^= 255
    archive.write_bytes(raw)
    data = open_data(archive)
    failed = []
    for split in data.splits.values():
        for i in range(len(split)):
            try:
                split.read(i)
            except UnreadableImage as error:
                failed.append((error.name, error.reason))
    assert len(failed) == 1
    assert failed[0][0] == "cat/00.png"
    assert "CRC" in failed[0][1]


def test_odd_names_open_and_stay_writable_as_text(make_folder):
    root = make_folder(cat=2, dog=2)
    odd = ["UPPER.JPG", "with space.png", "ünï©ode.png", "<b>&amp;.png", "new\nline.png"]
    for name in odd:
        Image.new("L", (3, 3), 9).save(root / "cat" / name, "PNG")
    raw_name = os.fsencode(str(root / "cat")) + b"/latin-\xe9.png"
    with open(raw_name, "wb") as file:
        Image.new("L", (3, 3), 9).save(file, "PNG")
    data = open_data(root)
    found = {name for split in data.splits.values() for name in names(split)}
    assert {f"cat/{name}" for name in odd} <= found
    assert "cat/latin-\\xe9.png" in found
    for split in data.splits.values():
        for i in range(len(split)):
            split.name(i).encode("utf-8")
            split.read(i)


def test_other_files_are_said_and_nested_folders_belong_to_their_class(make_folder):
    root = make_folder(cat=2, dog=2, cat__left__deep=1)
    (root / "cat/notes.txt").write_text("x")
    (root / "cat/.hidden.png").write_text("x")
    Image.new("L", (3, 3)).save(root / "loose.png")
    data = open_data(root)
    assert sum(len(split) for split in data.splits.values()) == 5
    assert data.notes == (
        "files not read as pictures, by their names: 1 .txt",
        "1 pictures lie outside the class folders and have no label: not used",
    )


def test_channels_are_asked_for(make_folder):
    data = open_data(make_folder(a=3, b=3), channels=1)
    assert data.channels == 1
    assert data.splits["train"].read(0).shape == (1, 10, 12)


def test_without_leaves_out_pictures_and_refuses_to_empty_a_class(make_folder):
    data = open_data(make_folder(train__a=2, train__b=1, val__a=1, val__b=1))
    fewer = data.without(["train/a/01.png", "val/b/00.png"])
    assert names(fewer.splits["train"]) == ["train/a/00.png", "train/b/00.png"]
    assert names(fewer.splits["val"]) == ["val/a/00.png"]
    with pytest.raises(InputError, match="the class 'b' has none left to train on"):
        data.without(["train/b/00.png"])


def test_statistics_are_those_of_all_pixels(make_folder):
    split = open_data(make_folder(a=4, b=4)).splits["train"]
    stacked = np.stack([split.read(i).numpy() for i in range(len(split))]) / 255
    mean, std = pixel_statistics(split)
    assert np.allclose(mean, stacked.mean((0, 2, 3)), atol=1e-12)
    assert np.allclose(std, stacked.std((0, 2, 3)), atol=1e-9)


REFUSED = [
    ({}, "has no pictures"),
    ({"only": 3}, "has one class, 'only'"),
    ({"a": 3, "b": 1}, "only one picture of 'b'"),
    (
        {"train__a": 2, "train__b": 2, "other__c": 1},
        r"split folders \(train\) beside other folders",
    ),
    ({"val__a": 2, "val__b": 2, "train__a": 1, "train__c": 1}, "classes that train lacks: 'b'"),
    ({"train__a": 2, "train__b": 2, "val__a": 1, "valid__a": 1}, "two folders for one split"),
]


@pytest.mark.parametrize(("counts", "message"), REFUSED)
def test_bad_folders_are_refused(make_folder, tmp_path, counts, message):
    (tmp_path / "data").mkdir()
    make_folder(**counts)
    with pytest.raises(InputError, match=message):
        open_data(tmp_path / "data")


def test_folders_of_loose_pictures_and_of_links_in_circles_are_refused(make_folder, tmp_path):
    root = make_folder(flat=0)
    Image.new("L", (3, 3)).save(root / "a.png")
    with pytest.raises(InputError, match="has 1 pictures but no class folders"):
        open_data(root)
    loop = make_folder("loop", a=2, b=2)
    (loop / "a/again").symlink_to(loop)
    with pytest.raises(InputError, match=r"a/again is a link that leads back"):
        open_data(loop)


def test_links_to_other_folders_are_followed(make_folder):
    root, store = make_folder(a=2), make_folder("store", b=3)
    (root / "b").symlink_to(store / "b")
    data = open_data(root)
    assert data.classes == ("a", "b")
    assert sum(len(split) for split in data.splits.values()) == 5


def test_a_folder_that_cannot_be_listed_is_refused(make_folder, monkeypatch):
    root = make_folder(a=2, b=2)
    scandir = os.scandir

    def guarded(path):
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(InputError, match=r"b cannot be listed \(Permission denied\)"):
        open_data(root)


def test_what_is_no_file_or_huge_is_unreadable_and_not_read(make_folder):
    root = make_folder(a=2, b=2)
    os.mkfifo(root / "a/pipe.png")  # to open it would wait for a writer without end
    (root / "a/zero.png").symlink_to("/dev/zero")
    (root / "a/gone.png").symlink_to(root / "nowhere")
    (root / "a/folder.png").mkdir()
    with open(root / "b/huge.png", "wb") as file:
        file.truncate((2 << 30) + 1)
    reasons = {}
    data = open_data(root)
    for split in data.splits.values():
        for i in range(len(split)):
            try:
                split.read(i)
            except UnreadableImage as error:
                reasons[error.name] = error.reason
    assert reasons == {
        "a/gone.png": "No such file or directory",
        "a/pipe.png": "it is a pipe or a device, not a file",
        "a/zero.png": "it is a pipe or a device, not a file",
        "b/huge.png": "its 2,147,483,649 bytes are over the limit of 2,147,483,648",
    }
    (root / "a/self.png").symlink_to(root / "a/self.png")
    with pytest.raises(InputError, match=r"self\.png cannot be followed \(Too many levels"):
        open_data(root)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_bad_fractions_are_refused(make_folder, fraction):
    with pytest.raises(InputError, match="it must lie between 0 and 1"):
        open_data(make_folder(a=2, b=2), val_fraction=fraction)


def test_what_is_no_data_is_refused(tmp_path):
    with pytest.raises(InputError, match="'nowhere' does not exist; give digits, a folder"):
        open_data("nowhere")
    (tmp_path / "a.doc").write_text("x")
    with pytest.raises(InputError, match="is a file of another kind"):
        open_data(tmp_path / "a.doc")
    (tmp_path / "a.zip").write_text("x")
    with pytest.raises(InputError, match="is not a whole zip archive"):
        open_data(tmp_path / "a.zip")


def write_rows(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",").writerows(rows)


def write_parquet(path, rows):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({name: [row[k] for row in rows[1:]] for k, name in enumerate(rows[0])})
    parquet.write_table(table, path)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".TSV", ".Parquet"])
def test_manifests_list_path_label_and_split(make_folder, suffix):
    root = make_folder(x=6)
    rows = [["split", "path", "label", "by"]]
    rows += [["dev" if i > 3 else "train", f"x/0{i}.png", "ab"[i % 2], "me"] for i in range(6)]
    path = root / f"list{suffix}"
    (write_parquet if suffix.lower() == ".parquet" else write_rows)(path, rows)
    data = open_data(path)
    assert names(data.splits["train"]) == [f"x/0{i}.png" for i in range(4)]
    assert data.splits["val"].labels.tolist() == [0, 1]
    assert data.splits["val"].read(1).shape == (3, 10, 12)
    assert "columns of the manifest that are not used: by" in data.notes


def test_a_manifest_without_splits_is_split_and_missing_files_are_unreadable(make_folder):
    root = make_folder(x=6)
    rows = [["path", "label"], *([f"x/0{i}.png", "ab"[i % 2]] for i in range(6)), ["x/9.png", "a"]]
    write_rows(root / "list.csv", rows)
    data = open_data(root / "list.csv")
    assert sum(len(split) for split in data.splits.values()) == 7
    place = [(s, i) for s in data.splits.values() for i in range(len(s)) if s.name(i) == "x/9.png"]
    with pytest.raises(UnreadableImage, match=r"x/9\.png cannot be read: No such file"):
        place[0][0].read(place[0][1])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["file", "label"], ["a", "b"]], "has the columns file, label but no path;"),
        ([["x"], ["a"]], "has the columns x but no path and no label"),
        ([["path", "label"], ["x/00.png", ""]], "row 2 has no label"),
        ([["path", "label"], ["x/00.png", "a"], ["x/00.png", "b"]], "twice, in rows 2 and 3"),
        ([["path", "label", "split"], ["x/00.png", "a", "exam"]], "row 2 has the split 'exam'"),
        (
            [["path", "label", "split"], ["x/00.png", "a", "val"], ["x/01.png", "a", ""]],
            "row 3 has no split",
        ),
        ([["path", "label"], ["gone.png", "a"]], "no file that .* lists exists; the first of 1 is"),
        ([["path", "label"]], "has no pictures"),
        ([["path", "label"], ["x/00.png", "big", " cat"]], "row 2 has more fields than the header"),
        ([["path", "label", "label"], ["x/00.png", "a", "b"]], "the column label more than once"),
        ([["path", "label"], ["a\0b", "a"]], "row 2 has the path"),
    ],
)
def test_bad_manifests_are_refused(make_folder, rows, message):
    root = make_folder(x=2)
    write_rows(root / "list.csv", rows)
    with pytest.raises(InputError, match=message):
        open_data(root / "list.csv")


def test_manifests_that_are_not_what_their_name_says_are_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"path,label\n\xff\xfe,x\n")
    with pytest.raises(InputError, match="is not a CSV file in UTF-8"):
        open_data(tmp_path / "a.csv")
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match="is not a whole Parquet file"):
        open_data(tmp_path / "a.parquet")
