"""Attention health by layer over training, for the report."""

import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard import _png as colour
from regard._io import read_metadata, write_text
from regard.data.dataset import Split
from regard.data.decode import UnreadableImage
from regard.errors import RegardError, counted
from regard.pages.charts import Line, chart
from regard.pages.html import Html, cards, facts, heat, joined, page, picture, section, table, tag
from regard.training.config import RunConfig
from regard.training.run_folder import RunFolder

# Width of the strips and height of a layer's row, in units of the drawing.
WIDTH, ROW, NAMES, FOOT = 420, 14, 26, 18
MOST_COLUMNS = 120


class Measure(NamedTuple):
    """A number that `attention_health` gives of each attention."""

    key: str
    title: str
    meaning: str


MEASURES = (
    Measure(
        "entropy", "Entropy", "in nats, mean over heads and queries; 0 is attention on one place"
    ),
    Measure("largest_logit", "Largest logit", "growth without bound foretells an unstable run"),
    Measure("q_gain", "Gain of the queries' norm", "1 at the start"),
    Measure("k_gain", "Gain of the keys' norm", "1 at the start"),
)


def attention_section(lines: Sequence[dict[str, Any]]) -> Html:
    """Strips by layer (down) and epoch (across) from metrics lines that have "attention"; empty
    markup where none has.

    "attention" maps module names to numbers, as `attention_health` gives them.
    """
    lines = thinned([line for line in lines if line.get("attention")])
    if not lines:
        return Html("")
    names = list(lines[-1]["attention"])
    strips = [strip(measure, names, lines) for measure in MEASURES]
    listed = ", ".join(f"{i}: {name}" for i, name in enumerate(names, start=1))
    return section(
        "Attention health",
        tag("p", "A row for each layer, first on top; time from left to right.", class_="soft"),
        tag("div", *strips, class_="figures"),
        tag("details", tag("summary", f"{len(names)} layers"), tag("p", listed)),
    )


def thinned(lines: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """At most `MOST_COLUMNS` of the lines, evenly, the last among them."""
    step = -(-len(lines) // MOST_COLUMNS)
    return lines[::-1][::step][::-1] if step > 1 else lines


def strip(measure: Measure, names: Sequence[str], lines: Sequence[dict[str, Any]]) -> Html:
    """One number as coloured cells, with its range in the caption; empty where no layer has it."""
    table = [[line["attention"].get(name, {}).get(measure.key) for line in lines] for name in names]
    values = [value for row in table for value in row if value is not None]
    if not values:
        return Html("")
    low, high = min(values), max(values)
    last = [row[-1] for row in table if row[-1] is not None]
    caption = tag(
        "figcaption",
        tag("b", measure.title),
        f" {low:.3g} (dark) to {high:.3g} (light), now {min(last):.3g} to {max(last):.3g}; "
        f"{measure.meaning}",
    )
    return tag("figure", caption, cells(measure, names, lines, table, shade(low, high)))


def shade(low: float, high: float) -> Callable[[float], str]:
    """From a value to its colour."""
    scale = colour.scale()
    reach = high - low or 1.0

    def of(value: float) -> str:
        red, green, blue = scale[round(255 * (value - low) / reach)].tolist()
        return f"rgb({red} {green} {blue})"

    return of


def cells(
    measure: Measure,
    names: Sequence[str],
    lines: Sequence[dict[str, Any]],
    table: Sequence[Sequence[float | None]],
    colour_of: Callable[[float], str],
) -> Html:
    """The drawing: a rectangle for each layer and time, its number in its title."""
    step = (WIDTH - NAMES) / len(lines)
    parts = []
    for i, (name, row) in enumerate(zip(names, table, strict=True)):
        y = i * ROW
        parts.append(
            f'<text x="{NAMES - 5}" y="{y + 11}" text-anchor="end" fill="var(--soft)" '
            f'font-size="11">{i + 1}</text>'
        )
        for j, value in enumerate(row):
            if value is not None:
                words = html.escape(f"{name}, step {lines[j]['step']}: {value:.4g}")
                parts.append(
                    f'<rect x="{NAMES + j * step:.2f}" y="{y}" width="{step + 0.3:.2f}" '
                    f'height="{ROW - 1}" fill="{colour_of(value)}"><title>{words}</title></rect>'
                )
    foot = len(names) * ROW + FOOT - 4
    for x, anchor, line in ((NAMES, "start", lines[0]), (WIDTH, "end", lines[-1])):
        parts.append(
            f'<text x="{x}" y="{foot}" text-anchor="{anchor}" fill="var(--soft)">'
            f"step {int(line['step'])}</text>"
        )
    label = html.escape(f"{measure.title} by layer over training")
    box = f"0 0 {WIDTH} {len(names) * ROW + FOOT}"
    return Html(
        f'<svg viewBox="{box}" role="img" aria-label="{label}" shape-rendering="crispEdges">'
        f"{joined(map(Html, parts))}</svg>"
    )


# report.html: what a run learned, how fast, and where it is wrong.


SAMPLES = 16
MOST_WRONG = 24
MATRIX_CLASSES = 30  # up to so many classes the confusion matrix shows its numbers


def write_report(run: str | Path | RunFolder) -> Path:
    """Write report.html into the run folder from what stands there; returns its path."""
    folder = RunFolder.open(run)
    write_text(folder.report_file, report(folder))
    return folder.report_file


def report(folder: RunFolder) -> str:
    """The page."""
    config, found, lines = folder.config(), folder.evaluation(), folder.metrics()
    title = f"{config.recipe.model} on {Path(config.recipe.data).name}"
    return page(
        title,
        tag("h1", title),
        tag("p", measured(folder, config, found["split"]), class_="soft"),
        headline(found, lines),
        section("Learning", curves(lines, config.recipe.label_smoothing)),
        attention_section(lines),
        section("Confusion", confusion(found["confusion"], config.classes)),
        section("By class", per_class(found["per_class"])),
        *pictures(folder, config),
        *troubles(found, lines),
        section("Said at the start", tag("ul", *(tag("li", note) for note in config.notes))),
        section("Recipe", facts(recipe_facts(config))),
        section("Ran on", facts(environment_facts(folder.environment()))),
    )


def measured(folder: RunFolder, config: RunConfig, split: str) -> str:
    """What the page's numbers are of: which weights, which images."""
    step, recipe = int(read_metadata(folder.weights_file)["step"]), config.recipe
    words = f"Run {folder.path.name}, measured on the {split} split with the weights of step {step}"
    if step == recipe.steps:
        return f"{words}, the last"
    return f"{words} of {recipe.steps}, the best on the val split"


def headline(found: dict[str, Any], lines: Sequence[dict[str, Any]]) -> Html:
    """The numbers that people look for first."""
    area = found["roc_auc"]
    speeds = sorted(line["images_per_second"] for line in lines if "images_per_second" in line)
    return cards(
        [
            ("accuracy", f"{found['accuracy']:.2%}"),
            ("balanced accuracy", f"{found['balanced_accuracy']:.2%}"),
            ("macro F1", f"{found['macro_f1']:.3f}"),
            ("ROC-AUC, one against rest", "none" if area is None else f"{area:.4f}"),
            ("log-loss", f"{found['log_loss']:.4f}"),
            ("calibration error", f"{found['calibration_error']:.3f}"),
            ("images measured", f"{found['images']:,}"),
            ("images a second in training", f"{speeds[len(speeds) // 2]:,.0f}" if speeds else "-"),
        ]
    )


def curves(lines: Sequence[dict[str, Any]], label_smoothing: float) -> Html:
    """Loss, accuracy, learning rate and speed over the epochs."""

    def line(name: str, key: str) -> Line:
        of = [entry for entry in lines if key in entry]
        return Line(name, [e["epoch"] for e in of], [e[key] for e in of])

    training = "training (smoothed targets)" if label_smoothing else "training"
    return tag(
        "div",
        chart("Loss", "epoch", [line(training, "loss"), line("held out", "log_loss")]),
        chart(
            "Held-out accuracy",
            "epoch",
            [line("accuracy", "accuracy"), line("balanced", "balanced_accuracy")],
            percent=True,
        ),
        chart("Learning rate", "epoch", [line("", "lr")]),
        chart("Images a second", "epoch", [line("", "images_per_second")]),
        class_="figures",
    )


def confusion(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> Html:
    """The matrix with its numbers, or for many classes as a picture; and the worst mix-ups."""
    parts = []
    if len(classes) <= MATRIX_CLASSES:
        parts += [matrix(counts, classes)]
    else:
        values = torch.tensor(counts, dtype=torch.float32)
        shares = values / values.sum(dim=1, keepdim=True).clamp_min(1)
        shown = heat(shares.sqrt(), "confusion matrix; rows are labels, columns predictions")
        parts += [tag("figure", shown, class_="heat")]
    parts.append(tag("p", "Rows are labels, columns predictions.", class_="soft"))
    mixed = [
        (counts[i][j], classes[i], classes[j])
        for i in range(len(classes))
        for j in range(len(classes))
        if i != j and counts[i][j]
    ]
    worst = sorted(mixed, key=lambda entry: (-entry[0], entry[1], entry[2]))[:8]
    if worst:
        words = [(label, guess, count) for count, label, guess in worst]
        parts.append(table(["label", "taken for", "images"], words, text=2))
    else:
        parts.append(tag("p", "Every image was classified right."))
    return tag("div", *parts)


def matrix(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> Html:
    """The confusion matrix as a table: right ones blue, mix-ups red, by their share of the row."""
    turned = "turned" if max(map(len, classes)) > 3 else None
    head = tag("tr", tag("th"), *(tag("th", tag("span", c, class_=turned)) for c in classes))
    rows = []
    for i, row in enumerate(counts):
        cells = []
        for j, count in enumerate(row):
            share = count / max(sum(row), 1)
            colour = "var(--good)" if i == j else "var(--bad)"
            strength = 0.65 * share if i == j else min(0.15 + 2 * share, 0.75)
            style = f"background: rgb({colour} / {strength:.2f})" if count else None
            cells.append(tag("td", count or "", style=style))
        rows.append(tag("tr", tag("th", classes[i]), *cells))
    inner = tag("table", tag("thead", head), tag("tbody", *rows))
    return tag("div", inner, class_="wide matrix")


def per_class(rows: Sequence[dict[str, Any]]) -> Html:
    """Scores of each class, the worst F1 first."""

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    ordered = sorted(rows, key=lambda row: (row["f1"], row["class"]))
    return table(
        ["class", "precision", "recall", "F1", "ROC-AUC", "images"],
        [
            [
                r["class"],
                *(shown(r[k]) for k in ("precision", "recall", "f1", "roc_auc")),
                r["support"],
            ]
            for r in ordered
        ],
    )


def pictures(folder: RunFolder, config: RunConfig) -> list[Html]:
    """The most wrong predictions and a sample of all, as the model saw them."""
    rows = folder.predictions()
    try:
        split = folder.data().splits[folder.evaluation()["split"]]
    except RegardError as error:
        return [section("Pictures", tag("p", f"They cannot be shown: {error}", class_="soft"))]
    places = {split.name(i): i for i in range(len(split))}
    wrong = [row for row in rows if row["label"] != row["predicted"]]
    wrong.sort(key=lambda row: (float(row["probability_of_label"]), row["name"]))
    some = rows[:: max(1, len(rows) // SAMPLES)][:SAMPLES]
    parts = []
    if wrong:
        words = f"{len(wrong)} of {len(rows)} are wrong; those given the least chance come first."
        parts.append(
            section(
                "Most wrong",
                tag("p", words, class_="soft"),
                gallery(wrong[:MOST_WRONG], split, places, config),
            )
        )
    return [*parts, section("Sample predictions", gallery(some, split, places, config))]


def gallery(
    rows: Sequence[dict[str, str]], split: Split, places: dict[str, int], config: RunConfig
) -> Html:
    """Pictures with what was said of them."""
    shown = []
    for row in rows:
        try:
            image = config.preprocess.shown(split.read(places[row["name"]]))
        except UnreadableImage:
            continue
        right = row["label"] == row["predicted"]
        guess = f"{row['predicted']} {float(row['probability']):.0%}"
        own = [] if right else [tag("div", "is ", row["label"], class_="soft")]
        shown.append(
            tag(
                "figure",
                picture(image, row["name"]),
                tag("div", guess, class_=None if right else "wrong"),
                *own,
                title=row["name"],
            )
        )
    return tag("div", *shown, class_="pictures")


def troubles(found: dict[str, Any], lines: Sequence[dict[str, Any]]) -> list[Html]:
    """What was said on the way, and images that could not be read."""
    notices = [(line["step"], line["notice"]) for line in lines if "notice" in line]
    parts = []
    if notices:
        words = [(notice, step) for step, notice in notices[:50]]
        parts.append(section("Said on the way", table(["notice", "step"], words)))
    if found["unreadable"]:
        parts.append(
            section(
                f"Not read, and not counted: {len(found['unreadable'])}",
                table(["image", "reason"], found["unreadable"][:50], text=2),
            )
        )
    return parts


def recipe_facts(config: RunConfig) -> list[tuple[str, Any]]:
    """The recipe, and the segments of a run that was resumed."""
    recipe = dict(vars(config.recipe))
    augment = recipe.pop("augment").to_dict()
    recipe["augment"] = {
        name: value for name, value in augment.items() if value not in (0, [], "none")
    }
    shown = [(name.replace("_", " "), plain(value)) for name, value in recipe.items()]
    for segment in config.segments[1:]:
        changed = {name: value for name, value in segment.changed.items() if value is not None}
        changes = plain(changed) if changed else "nothing changed"
        where = counted(segment.processes, "process", "processes")
        words = f"{changes}; {where} of {counted(segment.threads, 'thread')}"
        shown.append((f"resumed after step {segment.from_step}", words))
    return [(name, words) for name, words in shown if words]


def environment_facts(environment: dict[str, Any]) -> list[tuple[str, Any]]:
    """The machine and the versions."""
    values = {k: v for k, v in environment.items() if k != "packages"} | environment["packages"]
    return [(name.replace("_", " "), plain(value)) for name, value in values.items() if value]


def plain(value: Any) -> str:
    """A setting in words; what is off or empty is empty."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {plain(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return " × ".join(str(part) for part in value)
    return "" if value is None or value is False else str(value)
