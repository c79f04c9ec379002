"""The commands: parse, build a frozen options object, make one call. Each imports late."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from regard import __version__
from regard.errors import InputError, nearest
from regard.options import parse


@dataclass(frozen=True)
class EvalOptions:
    """Measure a run on images: accuracy, per-class scores and a confusion matrix."""

    run: Path
    """The run folder."""
    data: str
    """Images to measure on; of a source with several splits, the held-out one."""
    split: str | None = None
    """Which split, if not the held-out one: train, val or test."""
    batch_size: int = 256
    """Images in one forward pass."""
    device: str = "auto"
    """Where to compute: auto, cpu, cuda or mps."""


def train_command(arguments: list[str]) -> int:
    from regard.runs.config import TrainConfig
    from regard.runs.train import train
    from regard.views.report import write_report

    result = train(parse(TrainConfig, "train", arguments, ("data",)))
    report = write_report(result.folder)
    print(f"accuracy  {result.accuracy:.2%} on {result.held_out} held-out images")
    print(f"time      {result.minutes:.1f} minutes")
    print(f"report    {report}")
    print(f"run       {result.folder}")
    return 0


def eval_command(arguments: list[str]) -> int:
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
