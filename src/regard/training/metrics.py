"""How good predictions are: accuracy and its relatives, by class, and their calibration."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.errors import InputError, MissingExtraError

CALIBRATION_BINS = 15
PREDICTION_COLUMNS = ("name", "label", "predicted", "probability", "probability_of_label")


class NotFiniteAnswer(InputError):
    """A model answered with infinite numbers or none at all; `name` is the first such image."""

    def __init__(self, names: Sequence[str], which: np.ndarray) -> None:
        self.name = names[which[0]]
        super().__init__(
            f"the model's answers for {len(which)} of {len(names)} images, such as {self.name}, "
            "are not finite"
        )


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Predictions on a split: `labels` (n,) int64, `probabilities` (n, k), and what they are of.

    Images that could not be read are in `unreadable` as (name, reason), and are not counted.
    """

    data: str
    split: str
    classes: tuple[str, ...]
    names: tuple[str, ...]
    labels: np.ndarray
    probabilities: np.ndarray
    unreadable: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        good = np.isfinite(self.probabilities).all(axis=1)
        if not good.all():
            raise NotFiniteAnswer(self.names, np.flatnonzero(~good))

    @property
    def predicted(self) -> np.ndarray:
        """The most probable class (n,), the first where several are equal."""
        return self.probabilities.argmax(axis=1)

    @property
    def accuracy(self) -> float:
        """Share of the images whose most probable class is their label."""
        return float(np.mean(self.predicted == self.labels))

    def brief(self) -> dict[str, float]:
        """The numbers that are quick to compute: each evaluation during training has them."""
        recall = [np.mean(self.predicted[self.labels == c] == c) for c in np.unique(self.labels)]
        return {
            "accuracy": self.accuracy,
            "balanced_accuracy": float(np.mean(recall)),
            "log_loss": float(np.mean(-np.log(self.of_label.clip(1e-15)))),
            "calibration_error": calibration_error(self.probabilities, self.labels),
        }

    @property
    def of_label(self) -> np.ndarray:
        """The probability given to the label (n,)."""
        return np.take_along_axis(self.probabilities, self.labels[:, None], axis=1)[:, 0]

    def summary(self) -> dict[str, Any]:
        """All numbers, JSON-ready; what is not defined for these labels is None."""
        rows = self.per_class()
        areas = [row["roc_auc"] for row in rows if row["roc_auc"] is not None]
        scores = [row["f1"] for row in rows if row["support"]]
        return {
            "data": self.data,
            "split": self.split,
            "images": len(self.labels),
            **self.brief(),
            "macro_f1": float(np.mean(scores)),
            "roc_auc": float(np.mean(areas)) if areas else None,
            "unreadable": [list(entry) for entry in self.unreadable],
            "per_class": rows,
            "confusion": self.confusion().tolist(),
        }

    def per_class(self) -> list[dict[str, Any]]:
        """Precision, recall, F1, one-against-rest ROC-AUC and the count of each class."""
        metrics = sklearn_metrics()
        which = np.arange(len(self.classes))
        precision, recall, f1, support = metrics.precision_recall_fscore_support(
            self.labels, self.predicted, labels=which, zero_division=0.0
        )
        return [
            {
                "class": name,
                "precision": float(precision[c]),
                "recall": float(recall[c]),
                "f1": float(f1[c]),
                "roc_auc": (
                    float(metrics.roc_auc_score(self.labels == c, self.probabilities[:, c]))
                    if 0 < support[c] < len(self.labels)
                    else None
                ),
                "support": int(support[c]),
            }
            for c, name in enumerate(self.classes)
        ]

    def confusion(self) -> np.ndarray:
        """Counts (k, k): a row for each label, a column for each prediction."""
        k = len(self.classes)
        return np.bincount(self.labels * k + self.predicted, minlength=k * k).reshape(k, k)

    def predictions_csv(self) -> str:
        """One line an image."""
        best = self.probabilities.max(axis=1)
        rows = zip(self.names, self.labels, self.predicted, best, self.of_label, strict=True)
        lines = [
            (name, self.classes[label], self.classes[guess], f"{top:.6f}", f"{own:.6f}")
            for name, label, guess, top, own in rows
        ]
        return to_csv(PREDICTION_COLUMNS, lines)

    def per_class_csv(self) -> str:
        """`per_class` as a table."""
        rows = self.per_class()
        columns = tuple(rows[0])
        return to_csv(columns, [["" if r[c] is None else r[c] for c in columns] for r in rows])

    def confusion_csv(self) -> str:
        """`confusion` with the class names on both sides."""
        rows = [(name, *row) for name, row in zip(self.classes, self.confusion(), strict=True)]
        return to_csv(("label \\ predicted", *self.classes), rows)


def calibration_error(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Expected calibration error: Σ (n_b / n) |accuracy_b - confidence_b| over 15 equal bins.

    Source: Guo et al. 2017, arXiv 1706.04599, with bins of equal width over the confidence.
    """
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == labels
    bins = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    gaps = np.bincount(bins, weights=right - confidence, minlength=CALIBRATION_BINS)
    return float(np.abs(gaps).sum() / len(labels))


def to_csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A header and rows, quoted where needed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def sklearn_metrics() -> Any:
    """scikit-learn's metrics, or which extra to install."""
    try:
        import sklearn.metrics
    except ImportError:
        raise MissingExtraError("scikit-learn", "train", "per-class metrics") from None
    return sklearn.metrics
