"""Dataclasses to command lines."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from regard.cli import parse
from regard.errors import InputError


@dataclass(frozen=True)
class Nested:
    heads: int | None = None
    """How many heads."""


@dataclass(frozen=True)
class Options:
    """What it does."""

    data: str
    """Where the images are."""
    lr: float = 1e-3
    """Learning rate."""
    size: tuple[int, int] | None = None
    """Height and width."""
    resume: bool = False
    """Go on."""
    fit: Literal["crop", "stretch"] | None = None
    """How to fit."""
    out: Path | None = None
    """Where to write."""
    more: dict[str, int | float | str | bool | list[int] | None] = field(default_factory=dict)
    """Further options."""
    facts: Nested = field(default_factory=Nested)


def test_values_arrive_with_their_types():
    line = "digits --lr 0.5 --size 3 4 --resume --fit crop --out a/b --heads 2".split()
    line += "--more qk rms depth 3".split()
    got = parse(Options, "train", line, ("data",))
    assert got == Options(
        "digits", 0.5, (3, 4), True, "crop", Path("a/b"), {"qk": "rms", "depth": 3}, Nested(2)
    )
    assert type(got) is Options
    assert type(got.facts) is Nested
    assert parse(Options, "train", ["digits"], ("data",)) == Options("digits")


def test_values_of_a_dictionary_say_their_types_themselves():
    line = "digits --more a true b False c none d 3 e 1e-3 f rms g 32,64 h 0.5,1 i x,y".split()
    more = parse(Options, "train", line, ("data",)).more
    assert more == {"a": True, "b": False, "c": None, "d": 3, "e": 1e-3, "f": "rms",
                    "g": [32, 64], "h": [0.5, 1.0], "i": "x,y"}  # fmt: skip
    assert type(more["a"]) is bool
    assert type(more["d"]) is int


def test_help_is_the_docstrings(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(Options, "train", ["--help"], ("data",))
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for word in ("What it does.", "DATA", "Learning rate. (default: 0.001)", "--size INT INT",
                 "{crop,stretch}", "--out PATH", "--heads INT", "How many heads."):  # fmt: skip
        assert word in text
    assert "None" not in text
    assert "--no-resume" not in text


def test_what_follows_a_bare_dash_dash_is_given_by_place():
    line = ["--lr", "0.5", "--", "--help.jpg"]
    assert parse(Options, "train", line, ("data",)) == Options("./--help.jpg", 0.5)
    with pytest.raises(InputError, match=r"a file of that name is \./--help\.jpg\)"):
        parse(Options, "train", ["--help.jpg"], ("data",))


@dataclass(frozen=True)
class Checked:
    """Holds a value to be checked."""

    lr: float = 1.0
    """Learning rate."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise InputError(f"lr is {self.lr}; give more")


def test_a_value_is_refused_in_the_words_of_its_dataclass():
    assert parse(Checked, "train", ["--lr", "2"], ()) == Checked(2.0)
    with pytest.raises(InputError, match=r"^lr is 0\.0; give more$"):
        parse(Checked, "train", ["--lr", "0"], ())


def test_an_unknown_option_is_refused_with_the_nearest():
    with pytest.raises(InputError, match=r"train has no option --sise; nearest: --size.*--help"):
        parse(Options, "train", ["digits", "--sise", "3"], ("data",))


@pytest.mark.parametrize("line", [[], ["digits", "--lr", "fast"], ["digits", "--fit", "squash"]])
def test_bad_values_exit_with_2(line, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(Options, "train", line, ("data",))
    assert stop.value.code == 2
    assert "regard train --help" in capsys.readouterr().err
