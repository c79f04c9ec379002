"""study.html: its text, and in a real browser light, dark and on a phone."""

import dataclasses
import re
import shutil

import pytest

from regard.study.findings import summarise
from regard.study.study_page import band, study_page
from tests.study.conftest import result

COMMAND = "regard study '<img src=x onerror=alert(1)>'"


def rule(run):
    height = {"none": 1.0, "cap": 0.5, "unit": 0.1, "rms": 0.1}[run.form]
    broken = run.form == "none" and run.rate == 0.1 and run.seed == 1
    if broken:
        return {"loss": None, "accuracy": None}
    return {"loss": 0.1 + height * run.rate + run.seed / 100, "accuracy": 0.9 - run.seed / 100}


@pytest.fixture
def page(made_study):
    settings, grid, results = made_study(rule, optimizers=("adamw", "muon"))
    return study_page(summarise(settings, grid, results), results, COMMAND)


def test_the_page_is_whole_and_refers_to_nothing_outside(page):
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    assert not re.search(r"url\(|@import|<link", page)
    assert page.count("<h1>") == 1
    assert "Does QK norm help on made &lt;b&gt;up?" in page
    assert "<img" not in page, "text that looks like HTML is shown as text"
    # 6 figures over the rates, and over training 3 rates × (loss, gradient, 2 × 2 layers)
    assert page.count("<figure") == 2 * (6 + 3 * 6)


def test_the_tables_hold_the_figures(page):
    text = re.sub(r"<[^>]*>", "|", page)
    assert "1 of 9" in text
    row = r"no QK norm\|+[^|]+\|+0\.001\|+89\.0% ± 1\.0%"
    assert re.search(row, text), "form, sensitivity, best rate, accuracy there"


def test_rates_that_differ_are_told_apart(made_study):
    settings, grid, _ = made_study(rule)
    grid = dataclasses.replace(grid, rates=(0.12345671, 0.12345672))
    results = [result(run, 0.5, 0.9) for run in grid.runs()]
    made = study_page(summarise(settings, grid, results), results, COMMAND)
    for words in ("accuracy at 0.12345672", "from 0.12345671 to 0.12345672", "rate 0.12345671"):
        assert words in made


def test_a_study_whose_runs_all_diverged_at_once_has_a_page(made_study):
    settings, grid, results = made_study(lambda run: {"loss": None, "accuracy": None})
    for found in results:
        found["losses"] = [{"step": 10.5, "loss": None}, {"step": 30.5, "loss": None}]
    assert "9 of 9" in study_page(summarise(settings, grid, results), results, COMMAND)


def test_a_band_has_a_gap_where_a_seed_has_no_value():
    made = band("none", [1, 2, 3], [[1.0, 3.0], [2.0, None], []])
    assert made.mean == [2.0, None, None]
    assert made.low == [1.0, None, None]
    assert made.high == [3.0, None, None]


def test_the_page_in_a_browser(page, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    file = tmp_path / "study.html"
    file.write_text(page, encoding="utf-8")
    options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with playwright.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=chromium, args=options)
        colours = {}
        for scheme, width in (("light", 1200), ("dark", 1200), ("light", 360)):
            shown = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
            errors, asked = [], []
            shown.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
            shown.on("request", lambda request, asked=asked: asked.append(request.url))
            shown.on("dialog", lambda dialog, errors=errors: errors.append(dialog.message))
            shown.goto(file.as_uri())
            assert not errors
            assert asked == [file.as_uri()]
            assert shown.inner_text("h1") == "Does QK norm help on made <b>up?"
            wide = shown.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, "nothing may stick out of a narrow page"
            style = "getComputedStyle(document.querySelector('g.unit polyline')).stroke"
            background = "getComputedStyle(document.body).backgroundColor"
            colours[scheme] = (shown.evaluate(style), shown.evaluate(background))
            line = shown.locator("g.form.unit").first
            assert line.is_visible()
            shown.locator(".legend button.unit").first.click()
            assert not line.is_visible()
            assert shown.locator("g.form.rms").first.is_visible()
            shown.locator(".legend button.unit").first.click()
            assert line.is_visible()
        assert colours["light"][0] != colours["dark"][0]
        assert colours["light"][1] != colours["dark"][1]
        browser.close()
