"""The errors regard raises on purpose.

Every message says what came, what was needed and what to do. The command line turns
`RegardError.exit_code` into its exit status; anything else that escapes is our fault (1).
"""

import difflib
from collections.abc import Iterable


class RegardError(Exception):
    """Base of all deliberate errors."""

    exit_code = 2


class InputError(RegardError, ValueError):
    """An argument, file or setting that cannot be used as it is."""


class MissingExtraError(RegardError, ImportError):
    """An optional package is needed that is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package}, which is not installed: "
            f"pip install 'regard[{extra}]'"
        )


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun, as "1 step" and "1,000 steps"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def duration(seconds: float) -> str:
    """A time for people, as "7 s" and "3 min 20 s"."""
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def nearest(name: str, valid: Iterable[str], how_many: int = 3) -> str:
    """A phrase naming the valid names closest to `name`, for use in a refusal."""
    names = list(valid)
    close = difflib.get_close_matches(name, names, n=how_many, cutoff=0.4) or names[:how_many]
    return "nearest: " + ", ".join(close) if close else "there are none"


# Lists and long texts in messages.


def listing(keys: Iterable[str], most: int = 12) -> str:
    """Names in words, sorted, the first `most` of them."""
    return first(sorted(keys), most)


def first(names: Iterable[str], most: int = 12) -> str:
    """Names in words, in their order, the first `most` of them."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(brief(name, 120) for name in names[:most]) or "nothing") + more


def brief(text: object, most: int = 200) -> str:
    """Text on one line that can be printed, without its middle where it is long."""
    line = " ".join(str(text).split()).encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= most else f"{line[: most // 2]}…{line[-most // 2 :]}"
