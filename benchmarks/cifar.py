"""What recipes reach on CIFAR-10, from the folders of finished runs.

    regard train cifar10.zip --model pixel-resnet-s --minutes 20 --out runs/pixel-resnet-s
    python -m benchmarks.cifar runs/*

Prints a table (command, minutes of training, accuracy on the held-out images, minutes until 80,
85, 90 and 93%) and draws the learning curves into docs/results.png (`--picture`). Each row is one
run of `regard train`; what the command leaves out was decided by the preset and stands in the
run's config.json.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import table
from regard.training.run_folder import RunFolder

LEVELS = (0.80, 0.85, 0.90, 0.93)


def curve(run: RunFolder) -> list[tuple[float, float]]:
    """(minutes, accuracy) at each evaluation."""
    lines = [line for line in run.metrics() if "accuracy" in line]
    return [(line["seconds"] / 60, line["accuracy"]) for line in lines]


def reached(points: list[tuple[float, float]], level: float) -> str:
    """The minutes at which the accuracy was first at least `level`, or a dash."""
    return next((f"{minutes:.1f}" for minutes, accuracy in points if accuracy >= level), "—")


def row(run: RunFolder) -> list[str]:
    """The table's row of a finished run."""
    recipe = run.config().recipe
    found = json.loads(run.evaluation_file.read_text())
    points = curve(run)
    minutes = f"{points[-1][0]:.1f}"
    accuracy = f"{100 * found['accuracy']:.2f}%"
    times = [reached(points, level) for level in LEVELS]
    return [run.path.name, recipe.model, str(recipe.steps), minutes, accuracy, *times]


def picture(runs: list[RunFolder], path: Path) -> None:
    """Accuracy against minutes, one line a run, named at its end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for run in runs:
        points = curve(run)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=run.path.name)
    axes.set_xlabel("minutes of training")
    axes.set_ylabel("accuracy on the held-out images")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--picture", type=Path, default=Path("docs/results.png"))
    arguments: Any = parser.parse_args()
    runs = [RunFolder.open(path) for path in arguments.runs]
    levels = [f"min to {level:.0%}" for level in LEVELS]
    header = ["run", "model", "steps", "minutes", "accuracy", *levels]
    print(table(header, [row(run) for run in runs]))
    picture(runs, arguments.picture)
    print(f"learning curves: {arguments.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
