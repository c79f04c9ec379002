"""The forms that a study compares: those of QK norm, none, and none with a soft cap."""

import contextlib
import dataclasses
import json
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from regard._io import locked, meaning, read_json, write_json
from regard.errors import InputError, nearest
from regard.layers.qk_norm import FORMS as NORMS
from regard.layers.transformer import Attention
from regard.models.registry import create

#: In the order in which they are shown: without, the control, with.
FORMS = ("none", "cap", *NORMS)

NAMES = {
    "none": "no QK norm",
    "cap": "soft cap",
    "unit": "unit norm",
    "rms": "RMS norm",
    "layer": "layer norm",
}

#: Largest absolute logit under the soft cap; that of Gemma 2 (arXiv 2408.00118).
CAP = 50.0


def soft_cap(logits: Tensor, cap: float = CAP) -> Tensor:
    """cap · tanh(logits / cap): within (-cap, cap), nearly the identity far inside."""
    return cap * torch.tanh(logits / cap)


class CappedAttention(Attention):
    """Attention without QK norm whose logits pass through `soft_cap`.

    The control of a study: it bounds the logits as QK norm does, and normalises nothing. It
    writes its softmax out, all n × n of it, and is meant for small models only.
    """

    writes_softmax = True  # which a recorder must look for; our other attention calls `attend`

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.queries_keys_values(x)
        logits = soft_cap(self.scale * torch.matmul(q, k.mT))  # b g n d, b g m d -> b g n m
        heads = torch.matmul(torch.softmax(logits, dim=-1), v)
        return self.out(heads.transpose(1, 2).flatten(2))  # b g n d -> b n (g d)


def check_form(form: str) -> None:
    """Refuse what is no form."""
    if form not in FORMS:
        raise InputError(f"there is no form {form!r} of QK norm; forms are {', '.join(FORMS)}")


def build(form: str, arguments: dict[str, object], seed: int) -> nn.Module:
    """The model of `create(**arguments)` in one form, its weights drawn from `seed`.

    With one seed all forms start from the same weights: norms draw nothing.
    """
    check_form(form)
    torch.manual_seed(seed)
    model = create(**{**arguments, "qk_norm": form if form in NORMS else None})  # type: ignore[arg-type]
    if form == "cap":
        for module in model.modules():
            if type(module) is Attention:
                module.__class__ = CappedAttention
    return model


# What a study is asked for.


@dataclass(frozen=True)
class StudyOptions:
    """Does QK norm help on your images? Trains many small models over a grid of learning rates,
    forms of QK norm, seeds and optimizers, and writes study.html, study.csv and study.json."""

    data: str | None = None
    """Images to train on, as for train; the default is digits."""
    out: Path | None = None
    """The folder to write; the default is studies/NAME with the next free number."""
    resume: bool = False
    """Go on with the study in --out, without repeating finished runs; its grid may be extended."""
    like: Path | None = None
    """A run whose model, images and batch size to study."""
    quick: bool = False
    """A smaller grid of shorter runs: three rates, two seeds."""
    rates: str | None = None
    """Peak learning rates, such as 1e-3,1e-2,1e-1."""
    forms: str | None = None
    """Forms of QK norm: some of none,cap,unit,rms,layer (cap: none, with a soft cap on logits)."""
    seeds: int | None = None
    """How many seeds for each form and rate; the spread is over these."""
    optimizer: str | None = None
    """adamw, muon or adamw,muon."""
    steps: int | None = None
    """Optimizer steps in each run."""
    batch_size: int | None = None
    """Images in one step."""
    warmup: float | None = None
    """Share of the steps in which the learning rate rises; a cosine to 0 follows."""
    weight_decay: float | None = None
    """Decoupled weight decay of matrices."""
    model: str | None = None
    """Model name, such as simple-vit-nano/4."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels that images are brought to."""
    images: int | None = None
    """Train on at most so many images; as many at most are held out."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute."""
    workers: int | None = None
    """Runs at a time; the default is one for each core."""


# The shapes of a study's files: what stands in study.json, and what a run leaves.
#
# The checks raise plain `TypeError`, `ValueError` and `LookupError`; `_io.meaning` names the file.


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


OPTIMIZERS = ("adamw", "muon")

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


# The plan of a study: which runs, and what they share. It stands in study.json.


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


# The folder of a study: the only place that knows the names inside it.


@dataclass(frozen=True)
class Plan:
    """What a study does: the grid of runs, and what they share."""

    settings: Settings
    grid: Grid


class StudyFolder:
    """Plan, images, finished runs and results of one study."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.plan_file = self.path / "study.json"
        self.csv_file = self.path / "study.csv"
        self.page_file = self.path / "study.html"
        self.pictures_file = self.path / "pictures.npz"
        self.runs = self.path / "runs"
        self.lock_file = self.path / ".lock"

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def fresh(cls, out: Path | None, name: str) -> "StudyFolder":
        """A folder for a new study: `out`, empty or new, or studies/NAME, studies/NAME-2, …"""
        if out is not None:
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise InputError(
                    f"{out} exists already; add --resume to go on with the study in it, or give "
                    "another --out"
                )
            return cls(out)
        number, path = 1, Path("studies") / name
        while path.exists():
            number += 1
            path = Path("studies") / f"{name}-{number}"
        return cls(path)

    @classmethod
    def open(cls, path: Path | None) -> "StudyFolder":
        """An existing study, or a refusal."""
        if path is None:
            raise InputError("--resume needs --out, the folder of the study to go on with")
        folder = cls(path)
        if not folder.plan_file.is_file():
            raise InputError(
                f"{path} is no study (it has no {folder.plan_file.name}); give the folder that "
                "`regard study` wrote"
            )
        return folder

    def plan(self) -> Plan:
        """The plan in study.json."""
        values = read_json(self.plan_file)
        with meaning(self.plan_file):
            if values["format"] != 1:
                raise InputError(f"{self.plan_file} is of another version of regard; update it")
            check_plan(values)
            return Plan(Settings(**values["settings"]), Grid.from_dict(values["grid"]))

    def write_plan(self, plan: Plan, **results: Any) -> None:
        """study.json: the plan with the names of its runs and, when there are any, results."""
        values = {
            "format": 1,
            "settings": vars(plan.settings),
            "grid": plan.grid.to_dict(),
            "plan": [run.name for run in plan.grid.runs()],
        }
        write_json(self.plan_file, {**values, **results})

    def run_file(self, run: Run) -> Path:
        """Where the figures of one run stand once it is finished."""
        return self.runs / f"{run.name}.json"

    def write_run(self, run: Run, result: dict[str, Any]) -> None:
        write_json(self.run_file(run), result)

    def finished(self, run: Run) -> bool:
        """Whether the run is done; its file appears whole or not at all."""
        return self.run_file(run).is_file()

    def results(self, grid: Grid) -> list[dict[str, Any]]:
        """The figures of the finished runs of a grid."""
        found: list[dict[str, Any]] = []
        for run in grid.runs():
            if self.finished(run):
                result = read_json(self.run_file(run))
                with meaning(self.run_file(run)):
                    if {name: result[name] for name in vars(run)} != vars(run):
                        raise ValueError("it is of another run")
                    check_result(result)
                    if found and layers(result) != layers(found[0]):
                        raise ValueError("it is of another model")
                found.append(result)
        return found

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep every other study out of this folder; the system frees it with the process."""
        with contextlib.ExitStack() as stack:
            try:
                self.runs.mkdir(parents=True, exist_ok=True)
                stack.enter_context(
                    locked(
                        self.lock_file,
                        lambda holder: (
                            f"another study is writing {self}; wait for it, or give another --out"
                        ),
                    )
                )
            except OSError as error:
                raise InputError(
                    f"{self} cannot be written ({error.strerror or error}); give another --out"
                ) from None
            yield


def layers(result: dict[str, Any]) -> int:
    """How many attentions were measured in a run."""
    return len(result["points"][0]["entropy"])


def line(**message: Any) -> str:
    """One message between a study and its workers."""
    return json.dumps(message) + "\n"
