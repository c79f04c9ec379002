"""The plan of a study: which runs, and what they share. It stands in study.json."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from regard.errors import InputError, nearest
from regard.study.forms import CAP, FORMS, check_form
from regard.study.options import StudyOptions

OPTIMIZERS = ("adamw", "muon")

# What is not asked for; steps and batch suit a model that learns digits in seconds.
DEFAULTS: dict[str, Any] = {
    "rates": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "seeds": 3,
    "steps": 150,
    "batch_size": 64,
    "warmup": 0.1,
    "weight_decay": 0.05,
    "images": 5000,
}
QUICK = {"rates": (1e-3, 1e-2, 1e-1), "seeds": 2, "steps": 100}

Value = TypeVar("Value")


@dataclass(frozen=True)
class Run:
    """One training run of the grid."""

    optimizer: str
    form: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """As its file is called, such as adamw-unit-0.01-0."""
        return f"{self.optimizer}-{self.form}-{word_of(self.rate)}-{self.seed}"


@dataclass(frozen=True)
class Grid:
    """Every optimizer with every form, rate and seed."""

    optimizers: tuple[str, ...]
    forms: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: int

    def runs(self) -> list[Run]:
        """All runs, seed by seed, so that a study cut short has compared whole grids."""
        return [
            Run(optimizer, form, rate, seed)
            for seed in range(self.seeds)
            for optimizer in self.optimizers
            for rate in self.rates
            for form in self.forms
        ]

    def to_dict(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Grid":
        made: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**made)


@dataclass(frozen=True)
class Settings:
    """What all runs of a study share."""

    data: str
    like: str | None
    fingerprint: str
    classes: int
    most_images: int
    images: int
    held_out: int
    chance: float
    """Accuracy of always guessing the class most frequent among the held-out images."""
    model: dict[str, Any]
    """Arguments of `regard.create`, but for qk_norm."""
    preprocess: dict[str, Any]
    steps: int
    batch_size: int
    warmup: float
    weight_decay: float
    cap: float = CAP

    def __post_init__(self) -> None:
        within("steps", self.steps, 20, 10**9)
        within("batch_size", self.batch_size, 1, self.images)
        within("warmup", self.warmup, 0, 0.9)
        within("weight_decay", self.weight_decay, 0, 1e6)


def within(name: str, value: float, low: float, high: float) -> None:
    """Refuse a number outside its range, by name."""
    if not low <= value <= high:
        raise InputError(f"{name} is {value}; give a number from {low} to {high}")


def asked(options: StudyOptions, name: str) -> Any:
    """What is asked for by name, the quick or the usual default."""
    given = getattr(options, name)
    if given is not None:
        return given
    return QUICK.get(name, DEFAULTS[name]) if options.quick else DEFAULTS[name]


def new_grid(options: StudyOptions, before: Grid | None = None) -> Grid:
    """The grid asked for; what is not given is as `before`, or the default."""
    rates = words(options.rates, "rates", rate_of)
    forms = words(options.forms, "forms", form_of)
    optimizers = words(options.optimizer, "optimizer", optimizer_of)
    if before is not None:
        rates, forms = rates or before.rates, forms or before.forms
        optimizers = optimizers or before.optimizers
    seeds = before.seeds if before and options.seeds is None else asked(options, "seeds")
    within("seeds", seeds, 1, 1000)
    return Grid(
        optimizers=optimizers or ("adamw",),
        forms=tuple(form for form in FORMS if form in (forms or FORMS)),
        rates=tuple(sorted(rates or asked(options, "rates"))),
        seeds=seeds,
    )


def words(text: str | None, name: str, read: Callable[[str], Value]) -> tuple[Value, ...]:
    """The parts of a list with commas, each once; () where nothing is given."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        raise InputError(f"{name} is {text!r}; give values with commas between them")
    return tuple(dict.fromkeys(read(part) for part in parts))


def rate_of(word: str) -> float:
    try:
        rate = float(word)
    except ValueError:
        raise InputError(f"the rate {word!r} is no number; give rates such as 1e-3,1e-2") from None
    if not 0 < rate <= 1000:
        raise InputError(f"the rate {word} is not above 0 and at most 1000")
    return rate


def word_of(rate: float) -> str:
    """A rate that `rate_of` reads back to the same bits: as 0.001 and 1e-05 where that does."""
    short = f"{rate:g}"
    return short if float(short) == rate else repr(rate)


def form_of(word: str) -> str:
    check_form(word)
    return word


def optimizer_of(word: str) -> str:
    if word not in OPTIMIZERS:
        raise InputError(f"there is no optimizer {word!r}; {nearest(word, OPTIMIZERS)}")
    return word


def check_same(before: Settings, now: Settings) -> None:
    """Refuse to go on with a study whose runs would differ from those that are done."""
    for field in dataclasses.fields(Settings):
        old, new = getattr(before, field.name), getattr(now, field.name)
        if old != new:
            raise InputError(
                f"{field.name} is {new!r}, but the study was begun with {old!r}; leave it out, or "
                "start a new study without --resume. --resume may change rates, forms, seeds and "
                "optimizer"
            )
