"""report.html: what it says, that it is safe and self-contained, and how Chromium shows it."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from regard.pages.charts import Line, chart, label, span, thinned, ticks
from regard.pages.html import Html, page, picture, safe, table, tag
from regard.pages.train_report import confusion, write_report
from regard.training.config import TrainConfig
from regard.training.run_folder import RunFolder
from regard.training.trainer import train

CHROMIUM = "/usr/bin/chromium"
EVIL = '<img src=x onerror="document.title=1">'


def pictures(root: Path) -> Path:
    """Two classes, one of which looks like markup."""
    rng = np.random.default_rng(0)
    for name, low in ((EVIL, 0), ("plain & simple", 120)):
        (root / name).mkdir(parents=True)
        for i in range(12):
            pixels = (rng.integers(0, 130, (70, 90, 3)) + low).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}<b>.png")
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("report")
    data = pictures(place / "<i>data")
    config = TrainConfig(
        str(data), out=place / "run", model="simple-vit-nano/4", image_size=(72, 72), steps=3,
        model_options={"dim": 16, "heads": 2, "dim_head": 8, "depth": 1, "patch_size": 24},
        batch_size=8, precision="fp32", preset="small",
    )  # fmt: skip
    train(config, say=lambda line: None)
    write_report(place / "run")
    return RunFolder(place / "run")


def test_the_page_says_what_the_folder_says(run):
    text = run.report_file.read_text()
    found = run.evaluation()
    assert f"{found['accuracy']:.2%}" in text
    assert f"{found['log_loss']:.4f}" in text
    for row in found["per_class"]:
        assert f"{row['precision']:.3f}" in text
    for heading in (
        "Learning",
        "Attention health",
        "Confusion",
        "By class",
        "Sample predictions",
        "Recipe",
        "Ran on",
    ):
        assert f"<h2><bdi>{heading}</bdi></h2>" in text
    assert text.count("<polyline") == 6
    assert text.count("data:image/jpeg") >= 2


def test_names_that_look_like_markup_are_text_and_nothing_is_loaded(run):
    text = run.report_file.read_text()
    assert EVIL not in text
    assert "&lt;img src=x onerror=" in text
    assert not re.findall(r"<(?:script|link|iframe|object|embed)\b", text)
    assert all(s.startswith("data:image/") for s in re.findall(r'(?:src|href)="([^"]*)"', text))
    assert "url(" not in text


def test_a_report_without_its_data_says_so(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    config = RunFolder(copy).config()
    gone = dataclasses.replace(config.recipe, data=str(tmp_path / "gone"))
    RunFolder(copy).write_config(dataclasses.replace(config, recipe=gone))
    text = write_report(copy).read_text()
    assert "They cannot be shown:" in text
    assert "Sample predictions" not in text


def test_many_classes_become_a_picture_with_the_worst_mix_ups():
    k = 40
    counts = (5 * np.eye(k, dtype=int)).tolist()
    counts[3][7] = 4
    counts[9][1] = 2
    html = confusion(counts, [f"name{i}" for i in range(k)])
    assert 'alt="confusion matrix' in html
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    cells = [re.findall(r"<bdi>(.*?)</bdi>", row) for row in rows]
    assert cells == [
        ["label", "taken for", "images"],
        ["name3", "name7", "4"],
        ["name9", "name1", "2"],
    ]
    assert "Every image was classified right" in confusion([[1, 0], [0, 1]], ["a", "b"])


def test_text_is_escaped_and_markup_is_not():
    assert safe("<a>") == "<bdi>&lt;a&gt;</bdi>"
    assert safe(Html("<a>")) == "<a>"
    assert tag("p", "1 < 2", title='"x"') == '<p title="&quot;x&quot;"><bdi>1 &lt; 2</bdi></p>'
    assert "<title>&lt;t&gt;</title>" in page("<t>")
    assert '<td class="n"><bdi>3</bdi></td>' in table(["a", "b"], [["x", 3]])


def test_small_pictures_are_exact():
    import base64
    import io

    import torch

    image = torch.arange(12, dtype=torch.uint8).view(1, 3, 4)
    source = re.search(r'src="data:image/png;base64,([^"]*)"', picture(image, "a")).group(1)
    back = np.asarray(Image.open(io.BytesIO(base64.b64decode(source))))
    assert np.array_equal(back, image[0].numpy())


def test_ticks_are_round_and_span_the_values():
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(3, 47) == pytest.approx([0, 10, 20, 30, 40, 50])
    assert ticks(0.0012, 0.0031)[0] <= 0.0012
    assert ticks(0.0012, 0.0031)[-1] >= 0.0031
    assert span([2.0, 2.0]) == (1.8, 2.2)
    assert span([0.0]) == (-0.5, 0.5)


def test_long_lines_are_thinned_to_means():
    line = thinned(Line("a", list(range(900)), [float(v % 3) for v in range(900)]))
    assert len(line.x) == 300
    assert line.y == [1.0] * 300
    assert line.x[:2] == [1.0, 4.0]


def test_a_line_is_drawn_where_its_values_are():
    drawn = chart("t", "epoch", [Line("a", [0, 10], [0.0, 1.0])])
    points = re.search(r'points="([^"]*)"', drawn).group(1)
    # the plot spans x 54..410 and y 10..216 of 420 by 250
    assert points == "54.0,216.0 410.0,10.0"
    assert chart("t", "epoch", [Line("a", [], [])]) == ""


def test_numbers_beside_the_axis_are_short():
    assert [label(v, False) for v in (0.00125, 2.5, 999.4, 1650.0, 123456.7)] == [
        "0.00125", "2.5", "999", "1,650", "123,457",
    ]  # fmt: skip
    assert label(0.9077, True) == "90.77%"


def test_chromium_shows_it_on_a_phone_in_the_dark(run, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    if not Path(CHROMIUM).exists():
        pytest.skip("no Chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=flags)
        shades = {}
        for scheme in ("light", "dark"):
            sheet = browser.new_page(viewport={"width": 380, "height": 800}, color_scheme=scheme)
            said, asked = [], []
            sheet.on("console", lambda message, said=said: said.append(message.text))
            sheet.on("pageerror", lambda error, said=said: said.append(str(error)))
            sheet.on("request", lambda request, asked=asked: asked.append(request.url))
            sheet.goto(run.report_file.as_uri())
            assert said == []
            assert [url for url in asked if not url.startswith("data:")] == [
                run.report_file.as_uri()
            ]
            assert sheet.title() == "simple-vit-nano/4 on <i>data"
            assert sheet.evaluate("document.documentElement.scrollWidth") <= 380
            assert sheet.locator("svg").count() == 8
            assert sheet.locator("img").evaluate_all("all => all.every(i => i.naturalWidth > 0)")
            assert EVIL in sheet.locator("body").inner_text()
            colour = sheet.evaluate("getComputedStyle(document.body).backgroundColor")
            shades[scheme] = sum(json.loads(f"[{colour[4:-1]}]"))
        browser.close()
    assert shades["dark"] < 150 < 600 < shades["light"]
