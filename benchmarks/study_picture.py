"""A finished study as a picture for the docs.

`python -m benchmarks.study_picture FOLDER PICTURE.png`: final loss, held-out accuracy and largest
logit against the learning rate; lines are means over seeds, bands go from the least to the most.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from regard.study.findings import Cell, Summary, summarise
from regard.study.plan import NAMES, StudyFolder

COLOURS = {
    "none": "#c4401b", "cap": "#a87600", "unit": "#2463c9", "rms": "#0b8468", "layer": "#8a4fbf",
}  # fmt: skip
DASHES = {"cap": (0, (6, 2)), "rms": (0, (3, 1.5)), "layer": (0, (1, 1))}
PANELS: list[tuple[str, Callable[[Cell], Sequence[float]], bool]] = [
    ("final training loss", lambda c: c.loss, True),
    ("held-out accuracy, %", lambda c: [100 * x for x in c.accuracy], False),
    ("largest attention logit", lambda c: c.largest_logit, True),
]


def draw(summary: Summary, path: Path) -> None:
    """One row of panels an optimizer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    optimizers = summary.grid.optimizers
    figure, rows = plt.subplots(
        len(optimizers), 3, figsize=(10.5, 3.2 * len(optimizers)), layout="constrained",
        squeeze=False,
    )  # fmt: skip
    for row, optimizer in zip(rows, optimizers, strict=True):
        for axes, (title, values, log) in zip(row, PANELS, strict=True):
            for form, found in summary.forms[optimizer].items():
                seeds = [values(found.cells[rate]) for rate in summary.grid.rates]
                look = {"color": COLOURS[form], "linestyle": DASHES.get(form, "-")}
                means = [fmean(s) for s in seeds]
                axes.plot(summary.grid.rates, means, marker="o", ms=3, label=NAMES[form], **look)
                low, high = [min(s) for s in seeds], [max(s) for s in seeds]
                axes.fill_between(summary.grid.rates, low, high, color=COLOURS[form], alpha=0.13)
            axes.set_xscale("log")
            low, high = axes.dataLim.intervaly
            axes.set_yscale("log" if log and high > 10 * low else "linear")
            axes.set_title(title, fontsize=10)
            axes.set_xlabel(f"learning rate, {optimizer}", fontsize=8)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*rows[0][0].get_legend_handles_labels(), loc="outside lower center",
                  ncols=len(summary.grid.forms), fontsize=9, frameon=False)  # fmt: skip
    figure.savefig(path, dpi=130)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("picture", type=Path)
    given = options.parse_args()
    folder = StudyFolder(given.folder)
    plan = folder.plan()
    draw(summarise(plan.settings, plan.grid, folder.results(plan.grid)), given.picture)


if __name__ == "__main__":
    main()
