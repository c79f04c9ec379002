"""Sensitivity against a loop, comparisons against hand-computed intervals."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.study.findings import compare, sensitivity, steps_to, t_95, useful

LOSSES = st.one_of(st.none(), st.just(math.nan), st.just(math.inf), st.floats(0, 10))


def sensitivity_by_loop(losses, initial):
    """Wortsman et al. 2023: E[min(loss, initial)] - best, one number at a time."""
    total, best = 0.0, None
    for loss in losses:
        if loss is None or loss != loss or loss > initial:
            loss = initial
        total += loss
        if best is None or loss < best:
            best = loss
    return total / len(losses) - best


def test_sensitivity_of_a_made_up_curve():
    # (0.5 + 0.1 + 0.3) / 3 - 0.1
    assert sensitivity({1e-3: 0.5, 1e-2: 0.1, 1e-1: 0.3}, 2.3) == pytest.approx(0.2)


@pytest.mark.parametrize("broken", [None, math.nan, math.inf, 7.0])
def test_a_run_that_diverges_or_ends_worse_counts_as_its_initial_loss(broken):
    assert sensitivity({1e-3: 0.1, 1e-1: broken}, 2.3) == pytest.approx((0.1 + 2.3) / 2 - 0.1)


def test_a_grid_that_never_improves_has_sensitivity_zero():
    assert sensitivity({1e-3: 2.4, 1e-2: math.nan, 1e-1: 9.0}, 2.3) == 0


@given(st.lists(LOSSES, min_size=1, max_size=8), st.floats(0.1, 5))
def test_sensitivity_is_the_loop(losses, initial):
    grid = dict(enumerate(losses))
    assert sensitivity(grid, initial) == pytest.approx(
        sensitivity_by_loop(losses, initial), abs=1e-12
    )


def test_useful_keeps_a_loss_below_the_initial_one():
    assert useful(0.4, 2.3) == 0.4
    assert useful(3.0, 2.3) == 2.3


def test_steps_to_is_the_first_step_at_or_above():
    assert steps_to([(10, 0.2), (20, 0.5), (30, 0.4), (40, 0.9)], 0.5) == 20
    assert steps_to([(10, 0.2)], 0.5) is None


def test_comparison_by_hand():
    # means 2 and 6, both variances 1, n = 3: standard error √(2/3), 4 degrees of freedom
    found = compare([1, 2, 3], [5, 6, 7])
    assert found.difference == -4
    assert found.margin == pytest.approx(2.776 * math.sqrt(2 / 3))
    assert found.clear
    assert not compare([1, 2, 3], [2, 3, 4]).clear


def test_unequal_variances_by_hand():
    # variances 4 and 0 over 3: Welch's degrees of freedom are (4/3)² / ((4/3)² / 2) = 2
    found = compare([1, 3, 5], [9, 9, 9])
    assert found.margin == pytest.approx(4.303 * math.sqrt(4 / 3))


def test_welch_against_scipy_where_it_is_installed():
    stats = pytest.importorskip("scipy.stats")
    a, b = [0.1, 0.9, 0.4, 0.6, 0.2], [1.1, 1.2, 1.0, 1.3, 1.15]
    interval = stats.ttest_ind(a, b, equal_var=False).confidence_interval()
    half = (interval.high - interval.low) / 2
    found = compare(a, b)
    # degrees of freedom are rounded down, so ours is never the narrower
    assert half <= found.margin <= 1.1 * half


def test_one_seed_has_no_spread_and_nothing_is_clear():
    found = compare([1.0], [100.0, 101.0])
    assert found.margin is None
    assert not found.clear


def test_the_quantile_is_conservative_between_and_beyond_the_table():
    assert t_95(3.99) == 3.182
    assert t_95(4) == 2.776
    assert t_95(1000) == 2.086
