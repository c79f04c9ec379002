"""Frozen dataclasses to command lines: the docstring under a field is its help."""

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from regard._version import __version__
from regard.errors import InputError, duration, nearest

Options = TypeVar("Options")


def parse(
    options: type[Options], command: str, arguments: list[str], positional: tuple[str, ...]
) -> Options:
    """`arguments` as an instance of the dataclass `options`; exits with 2 on what is not legal.

    Fields named in `positional` are given by place, the others as --name value. A field that is
    itself such a dataclass adds its fields.
    """
    refuse_empty(arguments)
    arguments = by_place_first(arguments)
    refuse_unknown(command, arguments, option_names(options))
    shown: Any = described(options, positional)
    parsed = tyro.cli(
        shown,
        prog=f"regard {command}",
        args=arguments,
        description=inspect.cleandoc(options.__doc__ or ""),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return typing.cast(Options, rebuilt(options, parsed))


def described(options: type[Any], positional: tuple[str, ...] = ()) -> type[Any]:
    """A subclass of `options` whose fields tell the parser how help shows them."""
    hints = typing.get_type_hints(options)
    fields: list[Any] = []
    by_place: Any = tyro.conf.Positional
    for field in dataclasses.fields(options):
        hint = hints[field.name]
        default = dataclasses.field(default=field.default, default_factory=field.default_factory)
        if dataclasses.is_dataclass(hint):
            inner = described(typing.cast(Any, hint))
            kind: Any = Annotated[inner, tyro.conf.arg(name="")]
            default = dataclasses.field(default_factory=inner)
        else:
            word = metavar(field, hint, field.name in positional)
            shown = tyro.conf.arg(
                name=field.name.rstrip("_"), metavar=word, help_behavior_hint=default_hint(field)
            )
            if typing.get_origin(hint) is dict:
                hint = dict[str, Annotated[Any, VALUE]]
            kind = Annotated[hint, shown]
        if field.name in positional:
            kind = by_place[kind]
        fields.append((field.name, kind, default))
    # Values are checked when the dataclass itself is built, and refused in its own words.
    namespace = {"__doc__": options.__doc__, "__post_init__": lambda self: None}
    return dataclasses.make_dataclass(
        options.__name__, fields, bases=(options,), frozen=True, namespace=namespace
    )


def value_of(word: str) -> Any:
    """true, false and none, a number, numbers with commas between them as a list, or the word."""
    constants = {"true": True, "false": False, "none": None}
    if word.lower() in constants:
        return constants[word.lower()]
    for kind in (int, float):
        try:
            numbers = [kind(part) for part in word.split(",")]
        except ValueError:
            continue
        return numbers if "," in word else numbers[0]
    return word


#: How the values of a dictionary are read, whose types its fields do not say.
VALUE = PrimitiveConstructorSpec[Any](
    nargs=1,
    metavar="VALUE",
    instance_from_str=lambda words: value_of(words[0]),
    is_instance=lambda value: True,
    str_from_instance=lambda value: [str(value)],
)


def rebuilt(options: Any, parsed: Any) -> Any:
    """What was parsed as an instance of `options` itself, nested ones too."""
    hints = typing.get_type_hints(options)
    values = {}
    for field in dataclasses.fields(options):
        value = getattr(parsed, field.name)
        inner = hints[field.name]
        values[field.name] = rebuilt(inner, value) if dataclasses.is_dataclass(inner) else value
    return options(**values)


def option_names(options: type[Any]) -> list[str]:
    """The names of all fields, those of nested dataclasses in place of them."""
    hints = typing.get_type_hints(options)
    names = []
    for field in dataclasses.fields(options):
        inner = hints[field.name]
        names += (
            option_names(typing.cast(Any, inner))
            if dataclasses.is_dataclass(inner)
            else [field.name.rstrip("_")]
        )
    return names


def refuse_empty(arguments: list[str]) -> None:
    """Refuse an empty word, which a shell makes of a variable that is not set."""
    if "" in arguments:
        place = arguments.index("")
        where = f"after {arguments[place - 1]}" if place else "first"
        raise InputError(
            f"an empty word came {where}, as of a shell variable that is not set; give a value, or "
            "leave it out"
        )


def by_place_first(arguments: list[str]) -> list[str]:
    """What follows a bare -- before the first option, as what is given by place."""
    if "--" not in arguments:
        return arguments
    at = arguments.index("--")
    before, after = arguments[:at], arguments[at + 1 :]
    names = [f"./{name}" if name.startswith("-") else name for name in after]
    first = next((i for i, argument in enumerate(before) if argument.startswith("-")), at)
    return before[:first] + names + before[first:]


def refuse_unknown(command: str, arguments: list[str], names: Iterable[str]) -> None:
    """Refuse an option that the command does not have, with the nearest that it has."""
    known = ["--help", *("--" + name.replace("_", "-") for name in names)]
    for argument in arguments:
        option = argument.split("=")[0].replace("_", "-")
        if argument.startswith("--") and option not in known:
            raise InputError(
                f"{command} has no option {option}; {nearest(option, known)} "
                f"(regard {command} --help lists all; a file of that name is ./{argument})"
            )


def metavar(field: "dataclasses.Field[Any]", hint: Any, is_positional: bool) -> str | None:
    """What stands for the value in the help: DATA, [DATA] where it may be left out, IMAGES …
    where there may be several, PATH, {a,b}, INT INT; nothing for a flag.
    """
    if is_positional:
        several = typing.get_origin(hint) is tuple
        word = field.name.upper() + " …" * several
        return f"[{word}]" if field.default is None else word
    if hint is bool:
        return None
    kinds = [kind for kind in alternatives(hint) if kind is not type(None)]
    words = []
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            words.append("{" + ",".join(str(value) for value in typing.get_args(kind)) + "}")
        elif typing.get_origin(kind) is tuple:
            inner = typing.get_args(kind)
            words.append(
                "VALUE …" if inner[-1] is ... else " ".join(k.__name__.upper() for k in inner)
            )
        elif typing.get_origin(kind) is dict:
            words.append("NAME VALUE …")
        else:
            words.append(kind.__name__.upper())
    return "|".join(words)


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type that is none."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def default_hint(field: "dataclasses.Field[Any]") -> str:
    """The default as help shows it; nothing where it says nothing."""
    if field.default is dataclasses.MISSING:
        return "(required)" if field.default_factory is dataclasses.MISSING else ""
    return "" if field.default in (None, False, "", ()) else f"(default: {field.default})"


# The commands: parse, build a frozen options object, make one call. Each imports late.


@dataclass(frozen=True)
class EvalOptions:
    """Measure a run on images: accuracy and the like; with --out scores of each class and a
    confusion matrix, too."""

    run: Path
    """The run folder."""
    data: str | None = None
    """Images to measure on; the run's own held-out images if not given."""
    split: str | None = None
    """Which split: train, val or test; test, or else val, if not given."""
    device: str = "auto"
    """Where to compute: auto, cpu, cuda or mps."""
    out: Path | None = None
    """A new folder for the figures, the predictions and the confusion matrix as files."""


def train_command(arguments: list[str]) -> int:
    """`regard train`: train or resume, then write the report."""
    from regard.pages.train_report import write_report
    from regard.training.config import TrainConfig
    from regard.training.trainer import train

    result = train(parse(TrainConfig, "train", arguments, ("data",)))
    if not result.main:
        return 0
    report = write_report(result.folder)
    print(
        f"accuracy  {result.accuracy:.2%} on {result.held_out} held-out images\n"
        f"time      {duration(60 * result.minutes)}\n"
        f"report    {report}\n"
        f"run       {result.folder}"
    )
    return 0


def eval_command(arguments: list[str]) -> int:
    """`regard eval`: print the figures, and write them where asked."""
    from regard.training.evaluate import evaluate, write_evaluation
    from regard.training.run_folder import RunFolder

    options = parse(EvalOptions, "eval", arguments, ("run", "data"))
    if options.out is not None and options.out.exists():
        raise InputError(f"{options.out} exists; give --out a new folder")
    found = evaluate(options.run, options.data, split=options.split, device=options.device)
    numbers = found.summary()
    print(f"{found.data}, {found.split} split, {len(found.labels)} images")
    for name, value in numbers.items():
        if isinstance(value, float):
            shown = f"{value:.2%}" if "accuracy" in name else f"{value:.4f}"
            print(f"{name.replace('_', ' '):<20}{shown}")
    for name, reason in found.unreadable:
        print(f"not counted, unreadable: {name} ({reason})")
    if options.out is not None:
        options.out.mkdir(parents=True)
        write_evaluation(RunFolder(options.out), found)
        print(f"written to {options.out}")
    return 0


@dataclass(frozen=True)
class InspectOptions:
    """Look at a dataset before training: counts, sizes, bad files, duplicates, leaks."""

    data: str
    """A folder, a manifest, a zip, hf:NAME_OR_PATH, stream:NAME_OR_PATH or digits, as for train."""
    out: Path = Path("inspect")
    """The folder for inspect.html and quarantine.json, which train --quarantine leaves out."""
    fit: Literal["stretch", "crop", "letterbox"] = "stretch"
    """How the page shows that the model will see pictures of another shape."""
    image_size: tuple[int, int] = (64, 64)
    """Height and width, in pixels, of the model's input on the page."""
    channels: Literal[1, 3] | None = None
    """1 for grayscale, 3 for colour; what the source itself has if not given."""
    leaks: bool = False
    """Quarantine training pictures that stand in a held-out split too."""
    workers: int | None = None
    """Processes that read; one for each core if not given."""


def inspect_command(arguments: list[str]) -> int:
    """`regard inspect`: scan, then write the page and the quarantine list."""
    from regard.data.inspection import inspect_data
    from regard.data.open import open_data
    from regard.data.preprocess import Preprocess
    from regard.pages.inspect_page import write_inspection_page

    options = parse(InspectOptions, "inspect", arguments, ("data",))
    data = open_data(options.data, channels=options.channels)
    with progress_bar("pictures") as progress:
        found = inspect_data(data, workers=options.workers, progress=progress)
    options.out.mkdir(parents=True, exist_ok=True)
    page, quarantine = options.out / "inspect.html", options.out / "quarantine.json"
    preprocess = Preprocess(options.image_size, fit=options.fit, channels=data.channels)
    write_inspection_page(found, preprocess, page)
    found.write_quarantine(quarantine, leaks=options.leaks)
    for split, pictures in data.splits.items():
        print(f"{split:<12}{len(pictures):,} pictures")
    print(
        f"unreadable  {len(found.unreadable)}\n"
        f"duplicates  {len(found.duplicates)} groups\n"
        f"leaks       {len(found.leaks)}\n"
        f"conflicts   {len(found.conflicts)}\n"
        f"page        {page}\n"
        f"quarantine  {quarantine}"
    )
    for note in found.notes:
        print(f"note        {note}")
    return 0


def look_command(arguments: list[str]) -> int:
    """`regard look`: pictures of what a model attends to, and a page to point at."""
    from regard.pages.look import LookOptions, look

    result = look(parse(LookOptions, "look", arguments, ("run", "images")))
    if result.faithfulness:
        print("faithfulness, mean over the pictures: deletion is better low, insertion high")
    for name, numbers in (result.faithfulness or {}).items():
        said = "  ".join(f"{kind} {value:.4f}" for kind, value in numbers.items())
        print(f"{name:<12}{said}")
    print(f"maps        {len(result.pictures)} in {result.page.parent}\npage        {result.page}")
    return 0


def predict_command(arguments: list[str]) -> int:
    """`regard predict`: a row for each picture."""
    from regard.predict.predict import PredictOptions, predict

    print(predict(parse(PredictOptions, "predict", with_out(arguments), ("run", "inputs")), say))
    return 0


def export_command(arguments: list[str]) -> int:
    """`regard export`: one file, proven equal."""
    from regard.export.export import ExportOptions, export

    print(export(parse(ExportOptions, "export", with_out(arguments), ("run",)), say))
    return 0


def convert_command(arguments: list[str]) -> int:
    """`regard convert`: weights from one library's layout to another's."""
    from regard.convert.conversion import ConvertOptions, convert_file

    convert_file(parse(ConvertOptions, "convert", arguments, ("src",)))
    return 0


def study_command(arguments: list[str]) -> int:
    """`regard study`: whether QK norm helps on this data."""
    from regard.study.plan import StudyOptions
    from regard.study.study import study

    result = study(parse(StudyOptions, "study", arguments, ("data",)))
    print(f"{result.conclusion}\npage        {result.page}")
    return 0


def say(line: str) -> None:
    """Tell what is being done, beside the results that go to standard output."""
    print(line, file=sys.stderr, flush=True)


def with_out(arguments: list[str]) -> list[str]:
    """-o, which people type from habit, as --out."""
    return ["--out" if argument == "-o" else argument for argument in arguments]


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with the time left, moved by calls of (done, total)."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    count = TextColumn("{task.completed:,} of {task.total:,} " + what)
    with Progress(BarColumn(), count, TimeRemainingColumn(), transient=True) as bar:
        task = bar.add_task(what, total=1)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@dataclass(frozen=True)
class Command:
    """One line of help, and what runs."""

    help: str
    run: Callable[[list[str]], int]


COMMANDS = {
    "train": Command("train a classifier on your images, or go on with a run", train_command),
    "eval": Command("measure a run on images", eval_command),
    "predict": Command("name the classes of images with a run", predict_command),
    "inspect": Command("look at a dataset before training", inspect_command),
    "look": Command("see what a run attends to", look_command),
    "export": Command("write a run as one file, proven equal", export_command),
    "convert": Command("bring weights from one library's layout to another's", convert_command),
    "study": Command("find out whether QK norm helps on your images", study_command),
}

USAGE = """usage: regard COMMAND …

Self-attention over images: train, see, ship.

{commands}

regard COMMAND --help explains a command; regard --version prints {version}.
Start with: regard train digits"""


def usage() -> str:
    """The text of `regard --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return USAGE.format(commands="\n".join(lines), version=__version__)


def dispatch(arguments: list[str]) -> int:
    """Run the command that `arguments` name and return the exit code."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(__version__)
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        raise InputError(
            f"there is no command {name!r}; {nearest(name, COMMANDS)} (regard --help lists all)"
        )
    return COMMANDS[name].run(rest)
