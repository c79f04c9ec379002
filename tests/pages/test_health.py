"""The report's page of attention health."""

import re

from regard import _png as colour
from regard.pages.train_report import attention_section

NAMES = ["blocks.0.<b>", "blocks.1.attention"]


def lines(count):
    return [
        {"step": 10 * i, "attention": {
            NAMES[0]: {"entropy": 1.0 + i, "largest_logit": 5.0, "q_gain": 1.0},
            NAMES[1]: {"entropy": 3.0, "largest_logit": 6.0 + i},
        }}
        for i in range(1, count + 1)
    ]  # fmt: skip


def test_strips_by_layer_and_time():
    found = attention_section([{"step": 5, "loss": 1.0}, *lines(3)])
    assert found.count("<svg") == 3  # no layer has a key gain
    assert found.count("<rect") == 6 + 6 + 3
    assert "Entropy</bdi></b>" in found
    assert "2 (dark) to 4 (light), now 3 to 4" in found
    red, green, blue = colour.scale()[255].tolist()
    brightest = re.findall(rf'fill="rgb\({red} {green} {blue}\)"><title>([^<]*)', found)
    assert "blocks.0.&lt;b&gt;, step 30: 4" in brightest
    assert "blocks.1.attention, step 30: 9" in brightest
    assert "<b>, step" not in found


def test_long_runs_are_thinned_to_the_last_step():
    found = attention_section(lines(1000))
    assert found.count("<rect") <= 120 * 5
    assert "blocks.1.attention, step 10000: 1006" in found


def test_runs_without_it_have_no_section():
    assert attention_section([{"step": 1, "loss": 2.0}]) == ""
