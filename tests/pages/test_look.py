"""The look page in a real browser, and the pictures beside it."""

import re
import shutil

import numpy as np
import pytest
import torch

from regard import _png as colour
from regard.data.preprocess import Preprocess
from regard.errors import InputError
from regard.interpret.recording import GAP, sheet, tile_size
from regard.pages.look_data import LayerMaps, Look, Picture, look_at
from regard.pages.look_images import all_heads, beside, cell_map, chosen_map, mark_place, one_map
from regard.pages.look_page import coarser, joined_cells, look_page, stored
from tests.reference.handmade import Handmade, left_neighbour, top_right

HOSTILE = '<img src=x onerror="document.body.dataset.hacked=1"></script><b>\'&amp;'


def shown(rule=left_neighbour, *, fit="stretch", original=(24, 40), name="cat.png", classes=None):
    """A page's content from a hand-made model on a 3×5 grid."""
    preprocess = Preprocess((12, 20), fit)
    pixels = torch.randint(0, 256, (3, *original), dtype=torch.uint8)
    picture = Picture(name, pixels, preprocess(pixels), preprocess.geometry(*original))
    return look_at(Handmade(rule).eval(), picture, classes or ["dog", "cat"])


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page from its file, without a network, and fails on any error in it."""
    errors = []
    contexts = []

    def open_page(text, **options):
        file = tmp_path / "look.html"
        file.write_text(text, encoding="utf-8")
        context = browser.new_context(offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda r: r.url.startswith(("file:", "data:")) or errors.append(r.url))
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


def cell_of(page, element, grid=(3, 5), cell=(1, 2)):
    """Moves the pointer to the middle of a cell."""
    box = page.locator(element).bounding_box()
    x = box["x"] + box["width"] * (cell[1] + 0.5) / grid[1]
    y = box["y"] + box["height"] * (cell[0] + 0.5) / grid[0]
    page.mouse.move(x, y)
    page.wait_for_function(
        f"document.getElementById('overlay').dataset.at === '{cell[0]},{cell[1]}'"
    )


def heat_cells(page):
    """The colours of the overlay's cells (h, w, 3)."""
    return np.array(
        page.evaluate(
            """() => { const c = document.getElementById("heat");
              const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
              return Array.from({length: c.height}, (_, i) => Array.from({length: c.width},
                (_, j) => [0, 1, 2].map(k => d[4 * (i * c.width + j) + k]))); }"""
        )
    )


def test_pointing_at_a_place_shows_the_known_map(opened):
    page = opened(look_page(shown(), head=0))
    cell_of(page, "#overlay", cell=(1, 2))
    assert page.locator("#overlay").get_attribute("data-peak") == "1,1"
    cells = heat_cells(page)
    assert cells.shape == (3, 5, 3)
    assert np.array_equal(cells[1, 1], colour.scale()[255])
    dark = np.delete(cells.reshape(15, 3), 6, axis=0)
    assert (dark == colour.scale()[0]).all()
    assert "row 2, column 3" in page.locator("#said").inner_text()
    assert "row 2, column 2 (100 %" in page.locator("#said").inner_text()


def test_pointing_at_the_original_and_arrow_keys_move_the_same_place(opened):
    page = opened(look_page(shown(), head=0))
    original = ".stage:not(#overlay)"
    cell_of(page, original, cell=(2, 4))
    assert page.locator("#overlay").get_attribute("data-peak") == "2,3"
    page.locator("#overlay").focus()
    for key, at, peak in (
        ("ArrowUp", "1,4", "1,3"),
        ("ArrowLeft", "1,3", "1,2"),
        ("ArrowRight", "1,4", "1,3"),
        ("ArrowRight", "1,4", "1,3"),  # the edge
        ("ArrowDown", "2,4", "2,3"),
    ):
        page.keyboard.press(key)
        page.wait_for_function(f"document.getElementById('overlay').dataset.at === '{at}'")
        assert page.locator("#overlay").get_attribute("data-peak") == peak


def test_layer_head_and_views_can_be_chosen(opened):
    page = opened(look_page(shown(top_right), head=0, at=(0.9, 0.1)))
    overlay = page.locator("#overlay")
    assert (overlay.get_attribute("data-at"), overlay.get_attribute("data-peak")) == ("2,0", "0,4")
    page.select_option("#head", label="head 2")  # attends its own place
    page.wait_for_function("document.getElementById('overlay').dataset.peak === '2,0'")
    page.select_option("#layer", index=0)
    page.select_option("#head", label="head 1")
    page.wait_for_function("document.getElementById('overlay').dataset.peak === '0,4'")
    page.select_option("#view", label="rollout from a place")
    page.wait_for_function("document.getElementById('said').textContent.includes('rollout')")
    assert page.locator("#head-choice").is_hidden()
    assert page.locator("#title").inner_text() == "rollout from a place"
    page.select_option("#view", label="attention received")
    page.wait_for_function("document.getElementById('said').textContent.includes('receives most')")
    assert overlay.get_attribute("data-peak") == "0,4"
    page.select_option("#view", label="relevance for a class")
    page.wait_for_function("document.getElementById('said').textContent.includes('evidence')")
    page.locator("#opacity").fill("30")
    assert page.locator("#heat").evaluate("e => e.style.opacity") == "0.3"


def test_clicking_a_tile_chooses_its_layer_and_head(opened):
    page = opened(look_page(shown(), head=0))
    page.locator("#sheet").click(position={"x": 34 + 75 * 2 + 10, "y": 30})  # first row, head 2
    page.wait_for_function("document.getElementById('head').value === '1'")
    assert page.locator("#layer").input_value() == "0"


def test_touch_points_too(opened):
    page = opened(
        look_page(shown(), head=0), has_touch=True, viewport={"width": 390, "height": 800}
    )
    box = page.locator("#overlay").bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.5)
    page.wait_for_function("document.getElementById('overlay').dataset.at === '1,2'")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize(("fit", "original"), [("crop", (24, 80)), ("letterbox", (48, 40))])
def test_the_map_lies_where_the_input_was_on_the_picture(opened, fit, original):
    look = shown(fit=fit, original=original)
    page = opened(look_page(look, head=0))
    top, left, bottom, right = look.picture.box()
    stage = page.locator("#overlay").bounding_box()
    heat = page.locator("#heat").bounding_box()
    scale = stage["width"] / original[1]
    found = [heat["y"] - stage["y"], heat["x"] - stage["x"], heat["height"], heat["width"]]
    wanted = [top * scale, left * scale, (bottom - top) * scale, (right - left) * scale]
    assert found == pytest.approx(wanted, abs=1)
    x, y = (left + right) / 2, (top + bottom) / 2
    page.mouse.move(stage["x"] + x * scale, stage["y"] + y * scale)
    page.wait_for_function("document.getElementById('overlay').dataset.at === '1,2'")
    if fit == "crop":
        page.mouse.move(stage["x"] + 2, stage["y"] + y * scale)
        page.wait_for_function(
            "document.getElementById('said').textContent.includes('did not see')"
        )


def test_names_that_look_like_html_are_shown_and_not_run(opened):
    look = shown(name=HOSTILE, classes=[HOSTILE, "cat"])
    page = opened(look_page(look))
    assert HOSTILE in page.locator("h1").inner_text()
    assert HOSTILE in page.locator(".chances").inner_text()
    assert page.locator("#class option").first.text_content() in (HOSTILE, "cat")
    assert page.evaluate("document.body.dataset.hacked") is None
    assert page.locator("img[src=x]").count() == 0


def test_light_and_dark(opened):
    text = look_page(shown())
    backs = [
        opened(text, color_scheme=scheme).evaluate(
            "getComputedStyle(document.body).backgroundColor"
        )
        for scheme in ("light", "dark")
    ]
    brightness = [sum(map(int, re.findall(r"\d+", back)[:3])) for back in backs]
    assert brightness[0] > 600
    assert brightness[1] < 150


def test_a_page_of_twelve_layers_of_six_heads_at_14_by_14_stays_below_6_mb():
    torch.manual_seed(0)
    layers = tuple(
        LayerMaps(f"blocks.{i}.attention", (14, 14), torch.rand(6, 196, 196).softmax(-1))
        for i in range(12)
    )
    rollout = tuple(LayerMaps(m.name, m.grid, m.weights[:1]) for m in layers)
    preprocess = Preprocess((224, 224), "crop")
    pixels = torch.randint(0, 256, (3, 1000, 800), dtype=torch.uint8)
    picture = Picture("noise", pixels, preprocess(pixels), preprocess.geometry(1000, 800))
    relevance = {str(i): torch.rand(14, 14) for i in range(3)}
    text = look_page(Look(picture, layers, rollout, relevance, (("0", 1.0),)))
    assert len(text.encode()) < 6_000_000
    assert joined_cells([*layers, *rollout], 3_400_000) == 1


def test_stored_weights_come_back_within_a_step():
    weights = torch.rand(2, 15, 15).pow(4).softmax(-1)
    weights[0, 3] = 0
    kept = stored(LayerMaps("a", (3, 5), weights))
    import base64

    levels = np.frombuffer(base64.b64decode(kept["values"]), np.uint8).reshape(2, 15, 15)
    tops = np.frombuffer(base64.b64decode(kept["tops"]), "<f4").reshape(2, 15, 1)
    back = tops * (levels / 255.0) ** 2
    # A step of the square root is 1/255: the error is below √(A·top)/255 and a little.
    bound = np.sqrt(weights.numpy() * tops) / 255 + tops / 255**2
    assert (np.abs(back - weights.numpy()) <= bound).all()


def test_joining_cells_means_queries_and_sums_keys():
    weights = torch.rand(2, 15, 15, dtype=torch.float64)
    joined = coarser(LayerMaps("a", (3, 5), weights), 2)
    assert joined.grid == (2, 3)
    expected = np.zeros((2, 6, 6))
    counts = np.zeros(6)
    owner = [(i // 5 // 2) * 3 + (i % 5) // 2 for i in range(15)]
    for i in range(15):
        counts[owner[i]] += 1
        for j in range(15):
            expected[:, owner[i], owner[j]] += weights[:, i, j].numpy()
    np.testing.assert_allclose(joined.weights, expected / counts[:, None])
    assert joined_cells([LayerMaps("a", (3, 5), weights)], 2 * 15**2) == 1
    assert joined_cells([LayerMaps("a", (3, 5), weights)], 2 * 15**2 - 1) == 2


def test_the_picture_beside_the_overlay():
    look = shown(original=(24, 40))
    values = np.zeros((3, 5))
    values[0, 4] = 1
    pixels = beside(look.picture, values)
    zoom = 448 // 40
    assert pixels.shape == (24 * zoom, 2 * 40 * zoom + 12, 3)
    original = look.picture.original.permute(1, 2, 0).numpy()
    assert np.array_equal(pixels[5 * zoom, 7 * zoom], original[5, 7])
    right = 40 * zoom + 12
    lit = pixels[5 * zoom, right + 38 * zoom].astype(float)
    expected = 0.65 * colour.scale()[255] + 0.35 * original[5, 38]
    np.testing.assert_allclose(lit, expected, atol=1)
    dark = pixels[20 * zoom, right + 38 * zoom].astype(float)
    np.testing.assert_allclose(dark, 0.65 * colour.scale()[0] + 0.35 * original[20, 38], atol=1)


def test_the_place_looked_from_is_framed_on_the_overlay():
    look = shown(original=(24, 40))
    zoom = 448 // 40
    for row, column in ((0, 0), (1, 3)):
        pixels = beside(look.picture, np.zeros((3, 5)))
        before = pixels.copy()
        mark_place(pixels, look.picture, (row, column), (3, 5))
        top, left = round(row * 8 * zoom), round(40 * zoom + 12 + column * 8 * zoom)
        changed = (pixels != before).any(-1)
        rows, columns = np.nonzero(changed)
        assert (rows.min(), rows.max()) == (top, top + 8 * zoom - 1)
        assert (columns.min(), columns.max()) == (left, left + 8 * zoom - 1)
        assert (pixels[top, left : left + 8 * zoom] == 0).all()
        assert (pixels[top + 3, left + 4 : left + 8 * zoom - 4] == 255).all()
        assert not changed[top + 4 : top + 8 * zoom - 4, left + 4 : left + 8 * zoom - 4].any()


def test_coarse_maps_fill_the_tiles_of_fine_ones():
    fine, coarse = np.zeros((2, 14, 14)), np.zeros((1, 2, 2))
    fine[1, 0, 13] = coarse[0, 1, 1] = 1
    pixels = sheet([fine, coarse])
    assert tile_size([fine, coarse]) == (56, 56)
    assert pixels.shape == (2 * 56 + GAP, 2 * 56 + GAP, 3)
    low, high = colour.scale()[0], colour.scale()[255]
    assert (pixels[:4, 56 + GAP + 52 :] == high).all()
    assert (pixels[4:56, 56 + GAP :] == low).all()
    below = pixels[56 + GAP :, :56]
    assert (below[28:, 28:] == high).all()
    assert (below[:28] == low).all()
    assert (pixels[56 + GAP :, 56:] == 255).all()  # a layer with fewer heads


def test_pictures_say_what_they_show():
    look = shown(original=(24, 40))
    start = {"view": "from", "layer": 0, "head": None, "at": (0.5, 0.5)}
    bare = beside(look.picture, chosen_map(look, start))
    whole = one_map(look, start)
    assert whole.shape[0] > bare.shape[0]
    assert np.array_equal(whole[: len(bare), :448], bare[:, :448])
    words = whole[len(bare) :]
    assert (words < 128).any()
    assert (words.reshape(-1, 3) == colour.scale()[128]).all(-1).any()  # the colour scale
    maps = sheet([cell_map(layer, start["at"]) for layer in look.layers])
    heads = all_heads(look, start["at"])
    assert heads.shape[0] > maps.shape[0]
    assert heads.shape[1] > maps.shape[1]


def test_an_unknown_class_is_refused():
    preprocess = Preprocess((12, 20))
    pixels = torch.zeros(3, 12, 20, dtype=torch.uint8)
    picture = Picture("p", pixels, preprocess(pixels), preprocess.geometry(12, 20))
    with pytest.raises(InputError, match="there is no class 'cow'; the model knows 'dog', 'cat'"):
        look_at(Handmade(top_right), picture, ["dog", "cat"], wanted=["cow"])


def test_png_is_what_other_readers_read():
    image = pytest.importorskip("PIL.Image")
    import io

    from regard._png import png

    pixels = np.random.default_rng(0).integers(0, 256, (7, 5, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(image.open(io.BytesIO(png(pixels)))), pixels)
    assert np.array_equal(np.asarray(image.open(io.BytesIO(png(pixels[..., 0])))), pixels[..., 0])
