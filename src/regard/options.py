"""Frozen dataclasses to command lines: the docstring under a field is its help."""

import dataclasses
import inspect
import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from regard.errors import InputError, nearest

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
