"""Figures of predictions, against loops and scikit-learn."""

import csv
import io

import numpy as np
import pytest
from sklearn import metrics as sk

from regard.training.metrics import Evaluation, calibration_error


def made(n=300, k=4, seed=0, **changes):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, k, n)
    scores = rng.normal(size=(n, k)) + 1.5 * np.eye(k)[labels]
    probabilities = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    values = {
        "data": "d",
        "split": "val",
        "classes": tuple(f"c{i}" for i in range(k)),
        "names": tuple(f"n{i}" for i in range(n)),
        "labels": labels,
        "probabilities": probabilities,
    }
    return Evaluation(**{**values, **changes})


def test_the_summary_agrees_with_scikit_learn():
    e = made()
    got = e.summary()
    guess = e.probabilities.argmax(1)
    assert got["accuracy"] == pytest.approx(sk.accuracy_score(e.labels, guess))
    assert got["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(e.labels, guess))
    assert got["log_loss"] == pytest.approx(sk.log_loss(e.labels, e.probabilities))
    assert got["macro_f1"] == pytest.approx(sk.f1_score(e.labels, guess, average="macro"))
    area = sk.roc_auc_score(e.labels, e.probabilities, multi_class="ovr", average="macro")
    assert got["roc_auc"] == pytest.approx(area)
    assert got["confusion"] == sk.confusion_matrix(e.labels, guess).tolist()
    assert got["images"] == 300


def test_scores_by_class_are_counts():
    # labels 0 0 0 1 1, predictions 0 0 1 1 0; class 2 never occurs
    p = np.array(
        [[0.8, 0.1, 0.1], [0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.3, 0.6, 0.1], [0.5, 0.4, 0.1]]
    )
    e = made(k=3, labels=np.array([0, 0, 0, 1, 1]), probabilities=p, names=tuple("abcde"))
    first, second, third = e.per_class()
    assert (first["precision"], first["recall"], first["support"]) == (2 / 3, 2 / 3, 3)
    assert (second["precision"], second["recall"], second["support"]) == (0.5, 0.5, 2)
    # pairs (label 0, label 1) in which class 0 is more probable for the first: 4 of 6
    assert first["roc_auc"] == pytest.approx(4 / 6)
    assert third == {
        "class": "c2", "precision": 0.0, "recall": 0.0, "f1": 0.0, "roc_auc": None, "support": 0,
    }  # fmt: skip
    assert e.summary()["balanced_accuracy"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert e.summary()["macro_f1"] == pytest.approx((2 / 3 + 1 / 2) / 2)


def test_calibration_error_against_a_loop():
    e = made(n=500)
    confidence = e.probabilities.max(1)
    right = e.probabilities.argmax(1) == e.labels
    total = 0.0
    for b in range(15):
        inside = (confidence >= b / 15) & (confidence < (b + 1) / 15)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert calibration_error(e.probabilities, e.labels) == pytest.approx(total)


def test_certainty_and_error_are_worth_one():
    sure_and_wrong = np.array([[1.0, 0.0]] * 4)
    assert calibration_error(sure_and_wrong, np.ones(4, int)) == 1.0


def test_csv_files_say_the_same():
    names = ("a,b", '<b>"q"', *(f"n{i}" for i in range(298)))
    e = made(names=names)
    rows = list(csv.DictReader(io.StringIO(e.predictions_csv())))
    assert tuple(r["name"] for r in rows) == names
    assert [r["label"] for r in rows] == [f"c{i}" for i in e.labels]
    assert np.mean([r["label"] == r["predicted"] for r in rows]) == pytest.approx(e.accuracy)
    own = [float(r["probability_of_label"]) for r in rows]
    assert own == pytest.approx(
        [p[i] for p, i in zip(e.probabilities, e.labels, strict=True)], abs=1e-6
    )
    matrix = list(csv.reader(io.StringIO(e.confusion_csv())))
    assert [[int(v) for v in row[1:]] for row in matrix[1:]] == e.confusion().tolist()
    by_class = list(csv.DictReader(io.StringIO(e.per_class_csv())))
    assert [int(r["support"]) for r in by_class] == np.bincount(e.labels).tolist()
