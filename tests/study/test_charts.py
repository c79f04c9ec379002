"""Charts: places on axes by hand, gaps, bands, text made safe."""

import re

import pytest

from regard.pages.charts import Axis, Band, axis, band_shapes, log_marks, panel, short


def test_places_on_a_linear_and_a_logarithmic_axis():
    assert Axis(0, 10, 100, 200).at(2.5) == pytest.approx(125)
    log = Axis(0.01, 100, 0, 400, log=True)
    assert [round(log.at(v)) for v in (0.01, 0.1, 1, 100)] == [0, 100, 200, 400]
    assert log.at(0) == 0, "what a logarithm cannot show is held at the edge"
    assert Axis(0, 10, 200, 100).at(10) == pytest.approx(100), "upward axes run backwards"


def test_marks_of_logarithmic_axes():
    assert log_marks(0.5, 2000) == [1, 10, 100, 1000]
    assert log_marks(0.9, 6) == [1, 2, 5]
    assert log_marks(3.1, 3.9) == [3.1, 3.9]
    assert len(log_marks(1e-8, 1e12)) <= 7


def test_an_axis_of_one_value_has_room():
    made = axis([3.0], 0, 100, log=True)
    assert made.low < 3.0 < made.high
    made = axis([3.0], 0, 100, log=False)
    assert made.low < 3.0 < made.high


def test_numbers_are_short():
    assert [short(v) for v in (0, 0.25, 12.345, 26000, 1e-5, 1.5e-4, 3e6)] == [
        "0", "0.25", "12.3", "26,000", "1e-5", "1.5e-4", "3e6",
    ]  # fmt: skip
    assert short(0.915, percent=True) == "91.5%"


def test_a_band_has_its_line_its_range_and_a_gap():
    x, mean = [0.0, 1.0, 2.0, 3.0], [1.0, 2.0, None, 4.0]
    band = Band("unit", "unit norm", x, mean, [0.5, 2.0, None, 4.0], [1.5, 2.0, None, 4.0])
    across, up = Axis(0, 4, 0, 400), Axis(0, 4, 400, 0)
    drawn = "".join(band_shapes(band, across, up, False))
    lines = re.findall(r'<polyline points="([^"]*)"', drawn)
    assert lines == ["0.0,300.0 100.0,200.0", "300.0,0.0"]
    (area,) = re.findall(r'<polygon class="band" points="([^"]*)"', drawn)
    assert area == "0.0,250.0 100.0,200.0 100.0,200.0 0.0,350.0"
    assert re.findall(r"<title>([^<]*)", drawn)[0] == "unit norm, 0: 1"
    assert drawn.count("<circle") == 3


def test_a_panel_escapes_its_title_and_survives_nothing_to_show():
    empty = panel("<i>x</i>", [Band("none", "n", [1.0], [None], [None], [None])], log_y=True)
    assert "<i>" not in empty
    assert "&lt;i&gt;" in empty
    assert "<polyline" not in empty
