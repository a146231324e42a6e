"""Make a command from a typed function, and declare options that several commands share.

A command is a plain function: its parameters are its options and arguments, as typer reads them, and what it returns is the
exit code. A parameter whose type is an `@option_group` has no option of its own: each field of that dataclass is an option
or a group in turn, and the command gets the dataclass. A parameter `Annotated[T, From(maker)]` gets what the function
`maker` returns, whose parameters are options. So options that many commands share are declared once, next to the value that
they become, and are checked there.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar
from uuid import UUID

import typer
from typer import Option
from typer.core import TyperCommand

from waltzctl.shell.removed import check_options

T = TypeVar("T")
OWN, CHANGE, SPARK, CLUSTER, OUTPUT = "Options", "Change", "Spark", "Cluster", "Output"
"""Sections of a help page, in their order: the options of the command alone come first."""
_COLUMN_MAX = 30
_METAVARS = {"int": "N", "int range": "N", "uuid": "UUID", "directory": "DIR", "file": "FILE", "str": "TEXT"}
"""Typer's name of a type → default placeholder of a value in the help."""
_WANTED = {
    **dict.fromkeys(("int", "int range"), "a whole number"),
    **dict.fromkeys(("float", "float range"), "a number"),
    "uuid": "a UUID, like 5e0f0c8e-0d2f-4d0e-9a53-0a6f2f3c7b11",
}
"""Typer's name of a type → description of a valid value, for the message about an invalid one."""
_RANGE = re.compile(r"(?:(?P<low>[-0-9.]+)<=)?x(?:<=(?P<high>[-0-9.]+)|>=(?P<least>[-0-9.]+))")
"""Pattern of the bounds of a number, as typer prints them in the help."""
HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

Output = Annotated[Literal["table", "json"], Option("-o", "--output", rich_help_panel=OUTPUT, help="Output format.")]
Timeout = Annotated[float, Option("--timeout", min=0.1, max=60, metavar="SECONDS", help="Timeout of each call.")]
Key = Annotated[UUID | None, Option("--key", help="Cluster key that the storage must have.")]


@dataclass(frozen=True)
class From:
    """Marks a parameter whose value a function makes of options."""

    maker: Callable[..., Any]


_GROUPS: set[type] = set()


def option_group(cls: type[T]) -> type[T]:
    """Register a dataclass whose fields are options, so that a command can have a parameter of this type."""
    _GROUPS.add(cls)
    return cls


@dataclass(frozen=True)
class Bare:
    """Marks an option that may be given without a value."""

    value: str
    """Value of the option if none is given."""


WATCH_SECONDS = 2.0
Watch = Annotated[
    float | None,
    Option(
        "--watch",
        min=0.2,
        max=3600,
        metavar="[SECONDS]",
        help=f"Refresh at this interval ({WATCH_SECONDS:g} by default), until Ctrl-C.",
    ),
    Bare(f"{WATCH_SECONDS:g}"),
]


@dataclass(frozen=True)
class Negative:
    """Marks an argument whose value may begin with a dash."""


class Misused(typer.BadParameter):
    """Error for options or arguments that exclude each other."""

    def format_message(self) -> str:
        return self.message


def positive(text: str) -> float:
    """Parse a number above 0; raise `typer.BadParameter` for any other text."""
    try:
        found = float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number.") from None
    if not 0 < found < math.inf:
        raise typer.BadParameter(f"{found:g} is not more than 0, or has no end.")
    return found


def confirmed(question: str) -> bool:
    """Ask a yes-or-no question on standard error; typer alone would write a newline to standard output."""
    with redirect_stdout(sys.stderr):
        return typer.confirm(question)


def typed(question: str) -> str:
    """Ask for a text on standard error; return "" if none is given."""
    with redirect_stdout(sys.stderr):
        return str(typer.prompt(question, default="", show_default=False))


class Command(TyperCommand):
    bare: Mapping[str, str] = {}
    """Option that may be given without a value → its value then."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(self.completed(args))
        try:
            rest = super().parse_args(ctx, given.copy())
            for param in self.params:
                value = ctx.params.get(param.name)
                if isinstance(value, float) and math.isnan(value):  # no bound refuses it
                    raise typer.BadParameter("'nan' is not a number.", ctx=ctx, param=param)
            return rest
        except typer.TyperException as mistake:
            check_options(ctx.command_path.partition(" ")[2], given)
            if not isinstance(mistake, typer.BadParameter):
                raise
            type_ = getattr(mistake.param, "type", None)
            value, is_not, _ = mistake.message.partition(" is not ")
            if is_not and getattr(type_, "name", None) in _WANTED:
                mistake.message = f"{value} is not {_wanted(type_)}."
            raise

    def completed(self, args: Sequence[str]) -> Iterator[str]:
        """Yield the arguments, with the value of each `Bare` option that was given without one."""
        for word, following in pairwise([*args, "-"]):
            yield word
            if word in self.bare and following.startswith("-"):
                yield self.bare[word]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(param.make_metavar(ctx) for param in self.params if param.param_type_name == "argument")]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in (OWN, CHANGE, SPARK, CLUSTER, OUTPUT)}
        for section, head, text in option_records(self, ctx):
            sections[section].append((head, text))
        column = min(_COLUMN_MAX, max(len(head) for rows in sections.values() for head, _ in rows))
        for name, rows in sections.items():
            if rows:
                with formatter.section(name):
                    formatter.write_dl([(head.ljust(column), text) for head, text in rows])


def option_records(command: TyperCommand, ctx: Any) -> Iterator[tuple[str, str, str]]:
    """Yield section, name with placeholder, and help of each option of a command."""
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None and param.param_type_name == "option":
            head, text = record
            text = _RANGE.sub(lambda found: _between(found["low"] or found["least"], found["high"]), text)
            yield getattr(param, "rich_help_panel", None) or OWN, head, text


def _wanted(type_: Any) -> str:
    """Describe a valid value of a type, with its bounds, as in `a whole number from 0 on`."""
    low, high = getattr(type_, "min", None), getattr(type_, "max", None)
    is_bounded = low is not None or high is not None
    return _WANTED[type_.name] + (f" {_between(low, high)}" if is_bounded else "")


def _between(low: object, high: object) -> str:
    if high is None:
        return f"from {low} on"
    return f"up to {high}" if low is None else f"from {low} to {high}"


def command_of(name: str, function: Callable[..., int]) -> TyperCommand:
    """Return the command that runs this function. Parameters of the same name in several groups are one option."""
    parameters = {parameter.name: parameter for parameter in _parameters(function)}
    marks = {name: _marks(parameter) for name, parameter in parameters.items()}

    def run(**given: Any) -> int:
        made = _made(function, given)
        assert isinstance(made, int)
        return made

    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__doc__ = function.__doc__
    is_negative = any(isinstance(mark, Negative) for found in marks.values() for mark in found)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=Command, context_settings=HELP | {"ignore_unknown_options": is_negative})(run)
    command = typer.main.get_command(app)
    assert isinstance(command, Command)
    for param in command.params:
        param.metavar = param.metavar or _METAVARS.get(param.type.name)
    command.bare = {
        option: mark.value
        for param in command.params
        for mark in marks.get(str(param.name), ())
        if isinstance(mark, Bare)
        for option in param.opts
    }
    return command


def _signature(maker: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(maker, eval_str=True).parameters.values())


def _marks(parameter: inspect.Parameter) -> tuple[Any, ...]:
    return getattr(parameter.annotation, "__metadata__", ())


def _maker(parameter: inspect.Parameter) -> Callable[..., Any] | None:
    if isinstance(parameter.annotation, type) and parameter.annotation in _GROUPS:
        return parameter.annotation
    return next((mark.maker for mark in _marks(parameter) if isinstance(mark, From)), None)


def _element(parameter: inspect.Parameter) -> Any:
    """Return the type of one value of a repeatable option, else None. Typer takes lists; our options are tuples."""
    base = typing.get_args(parameter.annotation)[0] if _marks(parameter) else parameter.annotation
    inside = typing.get_args(base)
    return inside[0] if typing.get_origin(base) is tuple and inside[1:] == (...,) else None


def _parameters(maker: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    for parameter in _signature(maker):
        inner, element = _maker(parameter), _element(parameter)
        if inner is not None:
            yield from _parameters(inner)
        elif element is None:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        else:
            yield parameter.replace(
                kind=inspect.Parameter.KEYWORD_ONLY,
                annotation=Annotated[types.GenericAlias(list, (element,)), *_marks(parameter)],
                default=None if parameter.default == () else parameter.default,
            )


def _made(maker: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    values = {}
    for parameter in _signature(maker):
        inner = _maker(parameter)
        if inner is not None:
            values[parameter.name] = _made(inner, given)
        elif _element(parameter) is not None:
            values[parameter.name] = tuple(given[parameter.name] or ())
        else:
            values[parameter.name] = given[parameter.name]
    return maker(**values)
