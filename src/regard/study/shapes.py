"""The shapes of a study's files: what stands in study.json, and what a run leaves.

The checks raise plain `TypeError`, `ValueError` and `LookupError`; `files.meaning` names the file.
"""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from regard.study.forms import FORMS
from regard.study.plan import OPTIMIZERS

Kind = Callable[[Any], bool]

LARGEST = 3.5e38  # every figure was a float32


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST


def is_share(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1


def is_count(value: Any) -> bool:
    return type(value) is int and 0 < value <= LARGEST


def is_rate(value: Any) -> bool:
    return is_number(value) and 0 < value <= 1000


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def or_none(kind: Kind) -> Kind:
    return lambda value: value is None or kind(value)


def some(kind: Kind) -> Kind:
    """A list of them that is not empty."""
    return lambda value: isinstance(value, list) and bool(value) and all(map(kind, value))


def several(kind: Kind) -> Kind:
    """Such a list with nothing in it twice."""
    return lambda value: some(kind)(value) and len(set(value)) == len(value)


GRID: dict[str, Kind] = {
    "optimizers": several(lambda value: value in OPTIMIZERS),
    "forms": several(lambda value: value in FORMS),
    "rates": several(is_rate),
    "seeds": lambda value: is_count(value) and value <= 1000,
}
SETTINGS: dict[str, Kind] = {
    **dict.fromkeys(("data", "fingerprint"), is_text),
    "like": or_none(is_text),
    **dict.fromkeys(("classes", "most_images", "images", "held_out"), is_count),
    "chance": is_share,
    "model": lambda value: isinstance(value, dict),
    "preprocess": lambda value: isinstance(value, dict),
    **dict.fromkeys(("steps", "batch_size", "warmup", "weight_decay", "cap"), is_number),
}
MODEL: dict[str, Kind] = {
    "name": is_text,
    "image_size": lambda value: some(is_count)(value) and len(value) == 2,
}
RESULT: dict[str, Kind] = {
    **dict.fromkeys(("initial_loss", "seconds"), is_number),
    **dict.fromkeys(("final_loss", "held_out_loss"), or_none(is_number)),
    "accuracy": or_none(is_share),
    "diverged_at": or_none(is_count),
}
SERIES: dict[str, dict[str, Kind]] = {
    "losses": {"step": is_number, "loss": or_none(is_number)},
    "points": {
        "step": is_count,
        "largest_logit": some(or_none(is_number)),
        "entropy": some(or_none(is_number)),
        "gradient_norm": or_none(is_number),
    },
    "checks": {"step": is_count, "accuracy": is_share, "loss": or_none(is_number)},
}


def check_plan(values: Mapping[str, Any]) -> None:
    """Raise on what is no content of study.json."""
    check(values["settings"], SETTINGS, "settings.")
    check(values["settings"]["model"], MODEL, "settings.model.")
    check(values["grid"], GRID, "grid.")


def check_result(result: Mapping[str, Any]) -> None:
    """Raise on what is no outcome of `trial`."""
    check(result, RESULT)
    for name, shape in SERIES.items():
        if not result[name]:
            raise ValueError(f"{name} is {result[name]!r}")
        for entry in result[name]:
            check(entry, shape, f"{name}: ")
    points = result["points"]
    if len({len(p[name]) for p in points for name in ("largest_logit", "entropy")}) > 1:
        raise ValueError("points: the number of layers changes")
    if all(value is None for p in points for value in p["largest_logit"]):
        raise ValueError("points: no largest_logit is a number")
    if all(p["gradient_norm"] is None for p in points):
        raise ValueError("points: no gradient_norm is a number")


def check(values: Mapping[str, Any], shape: Mapping[str, Kind], where: str = "") -> None:
    """Raise where a value is missing or is none of its kind."""
    for name, fits in shape.items():
        if not fits(values[name]):
            raise ValueError(f"{where}{name} is {reprlib.repr(values[name])}")
