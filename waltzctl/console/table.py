"""Tables of a page, made of the columns that the tool's own tables have (`waltzctl.show.forms`).

A cell has the text that a person reads in the terminal and, where it is a number, the value that `-o json` gives: a page
has no figure of its own. A shape and a word show what a state means; the colour only repeats it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from waltzctl.show.forms import Column, Columns, Listing
from waltzctl.show.terminal import printable


class Tone(enum.StrEnum):
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    OFF = "off"
    """Neutral: unknown, or not expected."""


SHAPES = {Tone.GOOD: "●", Tone.WARN: "▲", Tone.BAD: "■", Tone.OFF: "○"}
WORDS = {
    Tone.GOOD: "open up live pass healthy done yes leader info",
    Tone.WARN: "draining waiting degraded warn warning slow catching_up connecting settling hangs slowed stopping begun "
    "interrupted recovering unknown voting recording admitting",
    Tone.BAD: "down silent fail error critical damaged diverged given_up refused offline",
    Tone.OFF: "gone debug no leaving",
}
_TONES = {word: tone for tone, words in WORDS.items() for word in words.split()}
LONG = 48
_WORST = (Tone.BAD, Tone.WARN, Tone.OFF, Tone.GOOD)


def tone_of(value: object) -> Tone:
    """Return the tone of a state: the worst of its words, which may be a list or separated by commas."""
    words = value if isinstance(value, list | tuple) else str(value).split(",")
    tones = {_TONES.get(str(word).strip().lower().partition(" ")[0], Tone.WARN) for word in words}
    return next(tone for tone in _WORST if tone in tones)


def tone_of_outcome(value: object) -> Tone:
    """Return the tone of the outcome of a change; an unknown word is an error."""
    return _TONES.get(str(value), Tone.BAD)


@dataclass(frozen=True, kw_only=True)
class Cell:
    text: str
    number: int | float | None = None
    """What programs read."""
    href: str = ""
    tone: Tone | None = None
    drawn: Markup | None = None
    """Drawing in front of the text."""

    @property
    def is_long(self) -> bool:
        """True if the text may be broken into lines."""
        return len(self.text) > LONG

    @property
    def shape(self) -> str:
        return "" if self.tone is None else SHAPES[self.tone]


@dataclass(frozen=True, kw_only=True)
class Head:
    name: str
    key: str
    """Key of the column in JSON; "" if it is not in JSON."""
    is_right: bool


@dataclass(frozen=True, kw_only=True)
class Grid:
    caption: str
    heads: tuple[Head, ...]
    rows: tuple[tuple[Cell, ...], ...]
    nothing: str


Of = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class GridStyle:
    """Links, tones and drawings of the columns of a table, by column name."""

    links: Mapping[str, Of] = field(default_factory=dict)
    tones: Mapping[str, Of] = field(default_factory=dict)
    """Function that maps the value of the column to its tone."""
    drawn: Mapping[str, Of] = field(default_factory=dict)
    """Function that maps the whole row to its drawing."""
    without: Collection[str] = ()
    wide: Collection[str] = ()
    """Wide columns that are shown if a row has a value there."""


PLAIN = GridStyle()


def grid(caption: str, columns: Columns[Any], rows: Sequence[Any], style: GridStyle = PLAIN, *, nothing: str = "") -> Grid:
    shown = [
        one
        for one in columns
        if one.name
        and one.name not in style.without
        and (not one.is_wide or (one.name in style.wide and any(one.shown(row) for row in rows)))
    ]
    return Grid(
        caption=caption,
        heads=tuple(Head(name=one.name, key=one.key, is_right=one.is_of_numbers(rows)) for one in shown),
        rows=tuple(tuple(_cell(one, row, style) for one in shown) for row in rows),
        nothing=nothing,
    )


def listed(caption: str, found: Listing[Any], style: GridStyle = PLAIN, rows: Sequence[Any] | None = None) -> Grid:
    """Return a table of a listing. `rows`: the rows to show; None for all."""
    return grid(
        caption, found.columns, found.rows if rows is None else rows, style, nothing=found.nothing or "There are none."
    )


def _cell(column: Column[Any], row: Any, style: GridStyle) -> Cell:
    value = column.value(row)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return Cell(
        text=printable(column.shown(row)),
        number=value if is_number and column.key else None,
        href=style.links[column.name](row) if column.name in style.links else "",
        tone=style.tones[column.name](value) if column.name in style.tones else None,
        drawn=style.drawn[column.name](row) if column.name in style.drawn else None,
    )
