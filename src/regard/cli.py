"""The commands: parse, build a frozen options object, make one call. Each imports late."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from regard import __version__
from regard.errors import InputError, duration, nearest
from regard.options import parse


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
    from regard.runs.config import TrainConfig
    from regard.runs.train import train
    from regard.views.report import write_report

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
    from regard.runs.evaluate import evaluate, write_evaluation
    from regard.runs.folder import RunFolder

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
    from regard.images import Preprocess, inspect_data, open_data, write_inspection_page

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
    from regard.views.look import LookOptions, look

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
    from regard.deploy.predict import PredictOptions, predict

    print(predict(parse(PredictOptions, "predict", with_out(arguments), ("run", "inputs")), say))
    return 0


def export_command(arguments: list[str]) -> int:
    """`regard export`: one file, proven equal."""
    from regard.deploy.export import ExportOptions, export

    print(export(parse(ExportOptions, "export", with_out(arguments), ("run",)), say))
    return 0


def convert_command(arguments: list[str]) -> int:
    """`regard convert`: weights from one library's layout to another's."""
    from regard.weights.command import ConvertOptions, convert_file

    convert_file(parse(ConvertOptions, "convert", arguments, ("src",)))
    return 0


def study_command(arguments: list[str]) -> int:
    """`regard study`: whether QK norm helps on this data."""
    from regard.study import StudyOptions, study

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
