import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from regard.data.inspection import inspect_data, near, same
from regard.data.open import open_data
from regard.data.preprocess import Preprocess
from regard.errors import InputError
from regard.pages.inspect_page import write_inspection_page

HOSTILE = "<img src=x onerror=alert(1)>.png"
BAD = ["train/cat/00.png", f"train/cat/{HOSTILE}", "val/dog/03.png"]


@pytest.fixture
def messy(make_folder):
    """Splits with a torn file, an empty one, copies across splits and labels, and odd files."""
    root = make_folder(train__cat=14, train__dog=12, val__cat=4, val__dog=4)
    torn = (root / "train/cat/00.png").read_bytes()
    (root / "train/cat/00.png").write_bytes(torn[: len(torn) // 2])
    (root / "val/dog/03.png").write_bytes(b"")
    # an exact copy in pixels, saved otherwise
    Image.open(root / "train/cat/01.png").save(root / "val/cat/copy.bmp")
    # the same picture under another label
    shutil.copy(root / "train/dog/02.png", root / "train/cat/dog.png")
    # nearly the same picture, held out under another label
    large = Image.open(root / "train/dog/05.png").resize((48, 40), Image.Resampling.BICUBIC)
    large.save(root / "val/cat/near.jpg", quality=70)
    frames = [Image.new("L", (20, 9), value) for value in (0, 255)]
    frames[0].save(root / "train/cat/film.gif", save_all=True, append_images=frames[1:])
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = Image.fromarray(np.random.default_rng(1).integers(0, 256, (9, 5), np.uint8))
    turned.save(root / "train/dog/turned.jpg", exif=exif)
    (root / "train/cat" / HOSTILE).write_bytes(b"<script>alert(1)</script>")
    return root


def test_everything_is_found_and_named(messy):
    data = open_data(messy)
    found = inspect_data(data, cache=None)
    assert [found.name(place) for place in found.unreadable] == BAD
    assert "truncated" in found.fact(found.unreadable[0]).reason
    assert found.fact(found.unreadable[2]).reason == "the file is empty"
    groups = [{found.name(place) for place in group} for group in found.duplicates]
    assert groups == [
        {"train/cat/01.png", "val/cat/copy.bmp"},
        {"train/cat/dog.png", "train/dog/02.png"},
    ]
    leaks = {(found.name(t.first), found.name(t.second)): t.similarity for t in found.leaks}
    assert set(leaks) == {
        ("val/cat/copy.bmp", "train/cat/01.png"),
        ("val/cat/near.jpg", "train/dog/05.png"),
    }
    assert leaks["val/cat/copy.bmp", "train/cat/01.png"] == 1
    assert 0.98 <= leaks["val/cat/near.jpg", "train/dog/05.png"] < 1
    conflicts = {frozenset((found.name(t.first), found.name(t.second))) for t in found.conflicts}
    assert conflicts == {
        frozenset(("train/cat/dog.png", "train/dog/02.png")),
        frozenset(("val/cat/near.jpg", "train/dog/05.png")),
    }
    assert "1 files hold several frames or pages; the first is read" in found.notes
    assert "1 pictures are turned upright as their metadata say" in found.notes
    turned = [f for f in found.readable() if f.orientation == 6]
    assert (turned[0].width, turned[0].height) == (9, 5)


def test_the_quarantine_list_is_honoured_and_refused_once_data_change(messy, tmp_path):
    data = open_data(messy)
    found = inspect_data(data, cache=None)
    listed = tmp_path / "quarantine.json"
    found.write_quarantine(listed)
    stored = json.loads(listed.read_text())
    assert [entry["name"] for entry in stored["quarantined"]] == BAD
    kept = open_data(messy, quarantine=listed)
    names = {s.name(i) for s in kept.splits.values() for i in range(len(s))}
    everything = {s.name(i) for s in data.splits.values() for i in range(len(s))}
    assert everything - names == set(BAD)
    assert kept.fingerprint == data.fingerprint
    assert kept.notes[-1].startswith("3 pictures on the quarantine list")
    found.write_quarantine(listed, leaks=True)
    kept = open_data(messy, quarantine=listed)
    names = {s.name(i) for s in kept.splits.values() for i in range(len(s))}
    assert {"train/cat/01.png", "train/dog/05.png"} <= everything - names
    assert {"val/cat/copy.bmp", "val/cat/near.jpg"} <= names
    (messy / "train/dog/00.png").unlink()
    with pytest.raises(InputError, match="has changed since the scan that wrote"):
        open_data(messy, quarantine=listed)
    listed.write_text("[]")
    with pytest.raises(InputError, match="is no quarantine list"):
        open_data(messy, quarantine=listed)


def test_the_scan_is_cached_and_only_changed_files_are_read_again(messy, tmp_path):
    data, cache = open_data(messy), tmp_path / "cache/scan.json"
    read = []

    def scan(opened):
        read.clear()
        return inspect_data(opened, cache=cache, progress=lambda done, of: read.append((done, of)))

    first = scan(data)
    total = sum(len(split) for split in data.splits.values())
    assert read == [(total, total)]
    assert scan(data).facts == first.facts
    assert read == []
    whole = Image.new("RGB", (12, 10), (9, 60, 3))
    whole.save(messy / "train/cat/00.png")
    again = scan(open_data(messy))
    assert read == [(1, 1)]
    assert [again.name(place) for place in again.unreadable] == BAD[1:]
    cache.write_text("{")
    scan(open_data(messy))
    assert read == [(total, total)]


def test_the_cache_lies_in_the_cache_folder(make_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "kept"))
    inspect_data(open_data(make_folder(a=3, b=3)))
    assert len(list((tmp_path / "kept").glob("scan-*.json"))) == 1


@pytest.mark.timeout(300)
def test_workers_find_the_same(messy):
    data = open_data(messy)
    assert inspect_data(data, cache=None, workers=2).facts == inspect_data(data, cache=None).facts


def test_remarks_on_grey_pictures_and_imbalance(make_folder):
    root = make_folder(a=40, b=3)
    for path in root.rglob("*.png"):
        Image.open(path).convert("L").save(path)
    notes = inspect_data(open_data(root), cache=None).notes
    assert "every picture is grey; --channels 1 trains on one channel" in notes
    assert any(note.startswith("the largest class has 18 times the pictures") for note in notes)


def test_digits_are_inspected():
    pytest.importorskip("sklearn")
    found = inspect_data(open_data("digits"), cache=None)
    assert not found.unreadable
    assert len(found.readable()) == 1797


def test_near_agrees_with_a_loop_over_all_pairs():
    generator = np.random.default_rng(0)
    corpus = generator.integers(0, 256, (30, 192)).astype(np.float64)
    queries = np.concatenate(
        [
            corpus[4:8] * 0.9 + generator.normal(0, 5, (4, 192)),
            corpus[:3] + 40,  # too much brighter
            generator.integers(0, 256, (9, 192)),
            np.full((1, 192), 128.0) + generator.normal(0, 0.2, (1, 192)),  # flat
        ]
    )
    expected = {}
    for i, q in enumerate(queries):
        for j, c in enumerate(corpus):
            x, y = q - q.mean(), c - c.mean()
            score = (x @ y) / np.sqrt((x @ x + 192) * (y @ y + 192))
            if score >= 0.98 and abs(q.mean() - c.mean()) <= 24:
                expected[i] = (j, score)
    got = {
        pair.i: (pair.j, pair.similarity)
        for pair in near(torch.from_numpy(queries), torch.from_numpy(corpus))
    }
    assert sorted(expected) == [0, 1, 2, 3]
    assert {i: j for i, (j, _) in got.items()} == {i: j for i, (j, _) in expected.items()}
    assert all(abs(got[i][1] - expected[i][1]) < 1e-5 for i in got)


def test_same_groups_equal_digests():
    assert same(["a", "b", "a", "c", "b", "a"]) == [[0, 2, 5], [1, 4]]


def test_the_page_shows_names_as_text_and_asks_for_nothing(messy, tmp_path):
    page = tmp_path / "inspect.html"
    write_inspection_page(inspect_data(open_data(messy), cache=None), Preprocess((16, 16)), page)
    html = page.read_text(encoding="utf-8")
    assert "<img src=x" not in html
    assert "&lt;img src=x onerror=alert(1)&gt;.png" in html
    assert "http" not in html
    assert "<script" not in html


@pytest.mark.timeout(300)
def test_the_page_in_a_browser(messy, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser_path is None:
        pytest.skip("there is no Chromium")
    page_path = tmp_path / "inspect.html"
    found = inspect_data(open_data(messy), cache=None)
    write_inspection_page(found, Preprocess((16, 16), "letterbox"), page_path)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        for width, scheme in ((1200, "light"), (360, "dark")):
            page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            problems, requests, dialogs = [], [], []
            page.on("console", lambda message, seen=problems: seen.append(message.text))
            page.on("pageerror", lambda error, seen=problems: seen.append(str(error)))
            page.on("request", lambda request, seen=requests: seen.append(request.url))
            page.on("dialog", lambda dialog, seen=dialogs: (seen.append(1), dialog.dismiss()))
            page.goto(page_path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.locator(".fit-letterbox").is_visible()
            assert not page.locator(".fit-crop").is_visible()
            page.locator("label[for=fit-crop]").click()
            assert page.locator(".fit-crop").is_visible()
            assert not page.locator(".fit-letterbox").is_visible()
            broken = page.evaluate(
                "[...document.images].filter(i => i.complete && !i.naturalWidth).length"
            )
            assert broken == 0
            assert page.evaluate("document.images.length") > 10
            assert page.get_by_text("onerror=alert(1)").first.is_visible()
            background = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (background == "rgb(251, 251, 250)") == (scheme == "light")
            assert all(url.startswith(("file:", "data:")) for url in requests)
            assert not problems
            assert not dialogs
        browser.close()
