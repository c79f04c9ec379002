"""What an export is worth, as the table that ends it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.deploy.facts import FileFacts
from regard.deploy.proof import TOLERANCE, Agreement
from regard.deploy.timing import Latency

COLUMNS = ("", "size", "batch 1", "batch 32", "accuracy", "agreement")


def figures(
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
