"""The table that ends an export."""

import pytest

from regard.export.model_card import latency_cell


@pytest.mark.parametrize(
    ("latency", "cell"),
    [
        ({"ms": 1.25, "speedup": 2.0, "error": 0.1}, "1.2 ms (2.00 ± 0.10 ×)"),
        ({"ms": 0.7, "speedup": 5.05, "error": 2.6}, "0.7 ms (varied too much to compare)"),
    ],
)
def test_a_ratio_that_varied_too_much_is_not_given(latency, cell):
    assert latency_cell("fp32", latency) == cell
    assert latency_cell("eager", latency) == cell.partition(" (")[0]
