"""Figures summed up against hand-computed ones; sentences no stronger than the figures."""

import json
import math
import re

import pytest

from regard.study.findings import conclusion, headline, sentences, summarise
from regard.study.study_page import comparison_table

NOISE = (-0.01, 0.0, 0.01)


def widening(run):
    """QK norm helps at 0.1 only; the cap half as much."""
    height = {"none": 1.0, "cap": 0.5, "unit": 0.1, "rms": 0.1}[run.form]
    bad = height if run.rate == 0.1 else 0.0
    noise = NOISE[run.seed]
    return {
        "loss": 0.1 + bad + noise,
        "accuracy": 0.9 - bad / 2 + noise,
        "logit": {"none": 2600.0, "cap": 49.0, "unit": 12.0, "rms": 15.0}[run.form],
    }


def alike(run):
    return {"loss": 0.1 + NOISE[run.seed], "accuracy": 0.9 + NOISE[run.seed]}


def test_figures_of_a_form(made_study):
    summary = summarise(*made_study(widening))
    none = summary.forms["adamw"]["none"]
    # losses 0.1, 0.1, 1.1 with one noise a seed, which cancels
    assert none.sensitivity == pytest.approx([1 / 3] * 3)
    assert none.best_rate == 1e-3
    assert none.highest.accuracy == pytest.approx([0.39, 0.4, 0.41])
    assert none.lowest.loss == pytest.approx([0.09, 0.1, 0.11])
    assert none.highest.largest_logit == [2600.0] * 3
    assert none.highest.lowest_entropy == [1.0] * 3
    assert none.highest.gradient_norm == [41.0] * 3
    assert none.diverged == 0
    # the best mean accuracy is 0.9: steps to 81%, reached at the end, or never
    assert summary.target == pytest.approx(0.81)
    assert none.lowest.steps_to == [40, 40, 40]
    assert none.highest.steps_to == [None] * 3


def test_diverged_runs_count_as_chance_and_initial_loss(made_study):
    def rule(run):
        broken = run.form == "none" and run.rate == 0.1 and run.seed == 0
        return {"loss": None, "accuracy": None} if broken else alike(run)

    summary = summarise(*made_study(rule))
    none = summary.forms["adamw"]["none"]
    assert none.diverged == 1
    assert none.highest.accuracy == pytest.approx([0.1, 0.9, 0.91])
    assert none.highest.loss == pytest.approx([2.3, 0.1, 0.11])
    assert none.sensitivity[0] == pytest.approx((0.09 + 0.09 + 2.3) / 3 - 0.09)
    words = conclusion(summary, "adamw")
    assert "Diverged, to a loss that is not finite: 1 of 9 with no QK norm." in words
    json.dumps(summary.to_dict(), allow_nan=False)


def test_a_clear_difference_is_said_and_numbered(made_study):
    summary = summarise(*made_study(widening))
    sense, high, best, low = sentences(summary, "adamw")
    assert sense == (
        "Over learning rates from 0.001 to 0.1 the sensitivity to the rate is lower with soft cap "
        "(0.167), unit norm (0.0333) and RMS norm (0.0333) than with no QK norm (0.333), by more "
        "than the spread over seeds."
    )
    assert "held-out accuracy is higher with soft cap (65.0%)" in high
    assert best.startswith("With each form at its own best rate no form differs")
    assert low.startswith("At the lowest rate, 0.001, no form differs in the training loss")
    words = conclusion(summary, "adamw")
    assert words.startswith(
        "With AdamW, every form of QK norm makes the learning rate matter less here; at the best "
        "rate of each it shows no difference in accuracy larger than the spread."
    )
    assert "2,600 with no QK norm, 49 with soft cap, 12 with unit norm and 15" in words
    assert "every norm lowers it further than the cap" in words
    assert "None of the 36 runs diverged." in words


def test_no_difference_is_not_called_one(made_study):
    words = conclusion(summarise(*made_study(alike)), "adamw")
    assert "lower with" not in words
    assert "higher with" not in words
    assert (
        "shows no effect of QK norm on how much the learning rate matters that is larger" in words
    )
    assert "Capping the logits alone changes the sensitivity by no more than the spread" in words


def test_a_large_difference_within_a_larger_spread_is_not_called_one(made_study):
    def rule(run):
        swing = (-0.5, 0.0, 0.5)[run.seed] if run.form == "none" and run.rate == 0.1 else 0.0
        return {"loss": 0.7 + swing if run.form == "none" else 0.2, "accuracy": 0.5}

    sense = sentences(summarise(*made_study(rule)), "adamw")[0]
    assert "no form differs" in sense


def test_a_form_that_harms_is_said_to(made_study):
    def rule(run):
        worse = 0.5 if run.form == "unit" and run.rate == 1e-3 else 0.0
        return {"loss": 0.1 + worse + NOISE[run.seed], "accuracy": 0.9 - worse + NOISE[run.seed]}

    summary = summarise(*made_study(rule))
    sense, *_, low = sentences(summary, "adamw")
    assert "the sensitivity to the rate is higher with unit norm (0.167)" in sense
    assert "with soft cap (0) and RMS norm (0) the difference is within that spread" in sense
    assert "the training loss is higher with unit norm (0.6) than with no QK norm (0.1)" in low
    assert "some forms of QK norm change" in headline(summary, "adamw")


def test_one_seed_claims_nothing(made_study):
    summary = summarise(*made_study(widening, seeds=1))
    words = conclusion(summary, "adamw")
    assert words.startswith("One seed cannot say whether QK norm helps")
    assert "this says nothing of a difference" in words
    assert "by more than the spread" not in words
    assert "and with no QK norm" in words
    cells = set(re.findall(r"<bdi>([^<]*)</bdi></td></tr>", comparison_table(summary, "adamw")))
    assert cells == {"unknown"}  # whether it is larger than the spread: neither yes nor no


def test_without_a_baseline_the_headline_says_so(made_study):
    words = headline(summarise(*made_study(widening, forms=("unit", "rms"))), "adamw")
    assert "do not include both QK norm and none" in words


def test_sensitivity_zero_of_what_never_learned_is_no_merit(made_study):
    def rule(run):
        return {"loss": 2.4, "accuracy": 0.1} if run.form == "none" else alike(run)

    words = conclusion(summarise(*made_study(rule)), "adamw")
    assert (
        "No rate trained a model with no QK norm at all: its sensitivity of 0 is no merit." in words
    )
    words = conclusion(summarise(*made_study(alike)), "adamw")
    assert "no merit" not in words, "equally good at every rate is not the same as untrained"


def test_percents_and_targets_are_whole(made_study):
    summary = summarise(*made_study(alike))
    assert math.isclose(summary.target, 0.81)
