"""The commands: parse, build a frozen options object, make one call. Each imports late."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from regard import __version__
from regard.errors import InputError, nearest
from regard.options import parse


@dataclass(frozen=True)
class EvalOptions:
    """Measure a run on images: accuracy, per-class scores, a confusion matrix."""

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
    report = write_report(result.folder)
    print(
        f"accuracy  {result.accuracy:.2%} on {result.held_out} held-out images\n"
        f"time      {result.minutes:.1f} minutes\n"
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
            print(f"{name.replace('_', ' '):<20}{value:.4f}")
    for name, reason in found.unreadable:
        print(f"not counted, unreadable: {name} ({reason})")
    if options.out is not None:
        options.out.mkdir(parents=True)
        write_evaluation(RunFolder(options.out), found)
        print(f"written to {options.out}")
    return 0


@dataclass(frozen=True)
class Command:
    """One line of help, and what runs."""

    help: str
    run: Callable[[list[str]], int]


COMMANDS = {
    "train": Command("train a classifier on your images, or go on with a run", train_command),
    "eval": Command("measure a run on images", eval_command),
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
