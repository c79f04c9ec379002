"""What an export is worth, as the table that ends it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import counted
from regard.export.formats import FileFacts
from regard.export.parity import TOLERANCE, Agreement, Latency

COLUMNS = ("", "size", "batch 1", "batch 32", "accuracy", "agreement")


def export_figures(
    found: Mapping[str, Agreement],
    latency: Mapping[int, Mapping[str, Latency]],
    sizes: Mapping[str, int],
    precision: str,
) -> dict[str, Any]:
    """Everything measured, JSON-ready, by the name of what was measured."""
    rows: dict[str, Any] = {}
    for name, agreement in found.items():
        rows[name] = {
            **(agreement.figures() if name != "eager" else {"accuracy": agreement.accuracy}),
            "bytes": sizes.get(name),
            "latency": {
                str(batch): {"ms": t[name].milliseconds, "speedup": t[name].speedup,
                             "error": t[name].error}
                for batch, t in latency.items()
            },
        }  # fmt: skip
    tolerance = TOLERANCE[precision]
    return {"tolerance": tolerance if tolerance < 1 else None, "rows": rows}


def as_text(numbers: Mapping[str, Any]) -> str:
    """The table with aligned columns."""
    lines = [COLUMNS, *(line(name, row) for name, row in numbers["rows"].items())]
    widths = [max(len(cells[i]) for cells in lines) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(f"{text:<{width}}" for text, width in zip(cells, widths, strict=True)).rstrip()
        for cells in lines
    )


def as_markdown(numbers: Mapping[str, Any]) -> str:
    """The table in Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    lines += [line(name, row) for name, row in numbers["rows"].items()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def line(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of one row."""
    return (
        "eager torch" if name == "eager" else name,
        f"{row['bytes'] / 1e6:.1f} MB" if row["bytes"] else "",
        *(latency_cell(name, row["latency"][batch]) for batch in ("1", "32")),
        f"{row['accuracy']:.2%}",
        "" if name == "eager" else agreement_cell(row),
    )


def latency_cell(name: str, latency: Mapping[str, float]) -> str:
    """Milliseconds and how many times faster than eager torch, where that can be told."""
    spent = f"{latency['ms']:.1f} ms"
    if name == "eager":
        return spent
    if latency["error"] > latency["speedup"] / 2:
        return f"{spent} (varied too much to compare)"
    return f"{spent} ({latency['speedup']:.2f} ± {latency['error']:.2f} ×)"


def agreement_cell(row: Mapping[str, Any]) -> str:
    """How many images get the same class, and the largest difference."""
    return (
        f"{row['same_class']:.2%} of {row['images']:,} the same class, "
        f"largest difference {row['largest_difference']:.1e}"
    )


def title(facts: FileFacts, path: Path) -> str:
    """One line that says what a file is."""
    gives = "logits" if facts.takes == "tensor" else "probabilities"
    return (
        f"{path}: {facts.precision}, {facts.takes} to {gives}, dynamic {', '.join(facts.dynamic)}"
    )


# The model card that lies beside an exported file.


MANY = 40
WEAKEST = 3


def model_card(facts: FileFacts, path: Path, about: Mapping[str, Any]) -> str:
    """Markdown: what the file is, how to use it, data, classes, figures and limits.

    `about` is what the run folder says: see `Source.about`.
    """
    sections = [
        f"# {path.name}\n\n{introduction(facts, about)}",
        f"## Use\n\n{use(facts, path)}",
        f"## Data\n\n{data(facts, about)}",
        f"## Figures\n\n{figures(facts, about)}",
        f"## Limits\n\n{limits(facts, about)}",
        f"## Licence\n\n{facts.licence}",
    ]
    return "\n\n".join(sections) + "\n"


def introduction(facts: FileFacts, about: Mapping[str, Any]) -> str:
    """What the model is and where it comes from."""
    options = {k: v for k, v in facts.model.items() if k not in ("name", "num_classes")}
    said = ", ".join(f"{key} {value}" for key, value in options.items())
    return (
        f"An image classifier: {facts.model['name']}{f' ({said})' if said else ''}, "
        f"{len(facts.classes)} classes, {facts.precision}. Exported by regard "
        f"{facts.versions['regard']} with torch {facts.versions['torch']} from the run "
        f"`{facts.run['name']}` after {about['step']:,} steps (SHA-256 of the weights "
        f"`{facts.run['sha256'][:16]}`)."
    )


def use(facts: FileFacts, path: Path) -> str:
    """The file's input and output, and everything another program has to do."""
    pre, (h, w) = facts.preprocess, facts.preprocess.size
    c = pre.channels
    free = ", ".join(facts.dynamic)
    if facts.takes == "image":
        return (
            f"Input `images`: uint8 (batch, height, width, {c}), {colours(c)}, of any size; "
            f"dynamic: {free}. Resizing ({pre.fit}, to {h} × {w}), normalising and the softmax "
            "are inside.\nOutput `probabilities`: float32 (batch, "
            f"{len(facts.classes)}), in the order of the classes."
        )
    fits = {
        "stretch": f"resized to {h} × {w}, whatever their shape",
        "crop": f"cut to the largest centred part of the shape {h} : {w}, resized to {h} × {w}",
        "letterbox": f"resized to fit inside {h} × {w} and padded with the mean, centred",
    }
    multiple = (
        f" Height and width must be multiples of {facts.multiple[0]} and {facts.multiple[1]}."
        if "height" in facts.dynamic
        else f" Height and width are {h} and {w}; another size is refused."
    )
    return (
        f"Input `images`: float32 (batch, {c}, height, width), {colours(c)}; dynamic: {free}."
        f"{multiple} Pictures are {fits[pre.fit]} by bilinear interpolation with antialiasing in "
        f"floating point, then (v / 255 - mean) / std with mean {list(pre.mean)} and std "
        f"{list(pre.std)}.\nOutput `logits`: float32 (batch, {len(facts.classes)}), in the order "
        "of the classes; a softmax makes them probabilities."
    )


def colours(channels: int) -> str:
    """The order of the channels, in words."""
    return "RGB" if channels == 3 else "grey"


def data(facts: FileFacts, about: Mapping[str, Any]) -> str:
    """What it was trained on, and the classes."""
    names = [f"`{name}`" for name in facts.classes[:MANY]]
    rest = len(facts.classes) - len(names)
    return (
        f"Trained on {about['data']}. Classes, in order: {', '.join(names)}"
        f"{f' and {rest} more, which the metadata list' if rest else ''}."
    )


def figures(facts: FileFacts, about: Mapping[str, Any]) -> str:
    """The table, what it was measured on, and the run's own evaluation."""
    numbers = facts.figures
    measured = (
        f"On {numbers['images']:,} images of {numbers['proven_on']}; latency on "
        f"{numbers['machine']}, {counted(numbers['threads'], 'thread')}, in one interleaved run:"
    )
    parts = [measured, as_markdown(numbers)]
    if numbers["tolerance"] is not None:
        what = "logit" if facts.takes == "tensor" else "probability"
        what = what if facts.precision == "fp32" else "probability"
        parts.append(f"The file is kept because no {what} differs by more than "
                     f"{numbers['tolerance']:g} from the model's.")  # fmt: skip
    held = about["evaluation"]
    if held:
        parts.append(
            f"The run itself: accuracy {held['accuracy']:.2%}, balanced accuracy "
            f"{held['balanced_accuracy']:.2%}, macro F1 {held['macro_f1']:.3f} on "
            f"{held['images']:,} images ({held['split']})."
        )
    return "\n\n".join(parts)


def limits(facts: FileFacts, about: Mapping[str, Any]) -> str:
    """What not to expect."""
    lines = [
        f"It names one of {len(facts.classes)} classes for every picture, also for one that shows "
        "none of them; a low probability is a hint, no proof.",
        "The figures hold for images like those it was measured on; measure it on your own before "
        "you rely on it.",
    ]
    held = about["evaluation"]
    scored = [row for row in (held or {}).get("per_class", []) if row["support"]]
    if len(scored) > WEAKEST:
        weakest = sorted(scored, key=lambda row: row["recall"])[:WEAKEST]
        said = ", ".join(f"`{r['class']}` {r['recall']:.0%}" for r in weakest)
        lines.append(f"It finds these classes least: {said} (recall).")
    if facts.precision == "int8":
        lines.append(
            "Weights and activations of the linear layers are rounded to 8 bits; single "
            "probabilities can differ visibly from the model's."
        )
    return "\n".join(f"- {line}" for line in lines)
