"""What people read: text that is safe to show, tables that fit the screen, paragraphs, and pages that are drawn again and
again.

Results go to standard output. A pipe gets 80 columns and no colour, and tables are not wrapped there, so that a row stays a
line.
"""

from __future__ import annotations

import io
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from waltzd.errors import WaltzError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PIPE_COLUMNS = 10_000
ROWS_MAX = 100
"""Number of partitions up to which all are shown; of more, only those with a problem."""
_BLANKS = frozenset("\n\t\u00a0\u2009\u202f\u3000")
"""Characters that Python calls not printable and that are harmless, such as no-break spaces."""


def console(*, to_stderr: bool = False) -> Console:
    from rich.console import Console

    class Quiet(Console):
        def render_str(self, text: str, **given: Any) -> Text:  # everything that is no `Text` already comes through here
            return super().render_str(printable(text), **given)

        def on_broken_pipe(self) -> None:  # rich would end the process here, with an exit code of its own
            if not to_stderr:
                raise BrokenPipeError
            self.quiet = True  # notes that nobody reads stop no work

    stream = sys.stderr if to_stderr else sys.stdout
    width = None if stream.isatty() else 80
    return Quiet(file=stream, highlight=False, markup=False, emoji=False, width=width)


def silence_stdout() -> None:
    """Redirect standard output to /dev/null after its reader is gone, so that the flush at exit does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def printable(text: str) -> str:
    """Escape text so that it cannot move the cursor, change colours, or hide characters."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in _BLANKS else one.encode("unicode_escape").decode() for one in text)


def is_line(text: str) -> bool:
    """Return whether a text is one line of printable characters."""
    return not set("\n\t") & set(text) and printable(text) == text


def count(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def size(bytes_: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if bytes_ >= scale:
            return f"{bytes_ / scale:.1f} {unit}"
    return f"{bytes_} B"


def duration(milliseconds: int) -> str:
    for unit, scale in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if milliseconds >= scale and (milliseconds % scale == 0 or milliseconds >= 2 * scale):
            return f"{milliseconds // scale} {unit}"
    return f"{milliseconds} ms"


def rate(bytes_: int, seconds: float) -> float:
    """Return a rate in MB/s."""
    return round(bytes_ / max(seconds, 1e-6) / 1e6, 1)


def paragraph(out: Console, text: str, style: str = "") -> None:
    """Print a paragraph with a hanging indent; words are never broken."""
    for line in textwrap.wrap(
        text, max(20, out.width), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    ):
        out.print(line, style=style, soft_wrap=True)


# -- tables ------------------------------------------------------------------------------------------------------------


def table(out: Console, names: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, right: tuple[str, ...] = ()) -> None:
    from rich import box
    from rich.table import Table

    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    rows = [tuple(printable(cell) for cell in row) for row in rows]
    screen = out.width
    if not out.is_terminal:  # a program reads it, or a file takes it: a row stays a line
        out.width = PIPE_COLUMNS
    for name, width in zip(names, widths(names, rows, right, out.width - 2 * len(names)), strict=True):
        table.add_column(name, justify="right" if name in right else "left", overflow="fold", width=width)
    for row in rows:
        table.add_row(*row)
    out.print(table)
    out.width = screen


def widths(names: Sequence[str], rows: Sequence[Sequence[str]], whole: Sequence[str], room: int) -> Sequence[int | None]:
    """Return the width of each column; None for all if the table fits into `room` unbroken. Otherwise a column is at
    least as wide as its longest word, which may be an address to copy. Cells of `whole` columns, numbers with their
    units, are not broken. The column that lacks most gets the space that is left. If even that does not fit, the
    longest words are broken."""
    from rich.cells import cell_len

    columns = list(zip(names, *rows, strict=True))
    wanted = [max(cell_len(line) for cell in column for line in cell.splitlines() or [""]) for column in columns]
    if sum(wanted) <= room:
        return [None] * len(names)
    given = []
    for name, *cells in columns:
        pieces = cells if name in whole else [word for cell in cells for word in cell.split()]
        given.append(max(1, *map(cell_len, [*name.split(), *pieces])))
    while sum(given) > max(room, len(names)):
        given[given.index(max(given))] -= 1
    while sum(given) < room:
        lacking = [want - has for want, has in zip(wanted, given, strict=True)]
        given[lacking.index(max(lacking))] += 1
    return given


# -- again and again ---------------------------------------------------------------------------------------------------


class Screen:
    """Screen for a page that is refreshed: in place on a terminal, else as a sequence of pages."""

    def __init__(self) -> None:
        from rich.live import Live

        self.out = console()
        self._live = (
            Live(console=self.out, screen=True, auto_refresh=False, vertical_overflow="crop")
            if self.out.is_terminal
            else None
        )

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with suppress(OSError):  # a terminal that went away
                self._live.stop()

    def put(self, found: Callable[[Console], None] | WaltzError, every: float) -> None:
        """Show a page, drawn by a function, or an error. `every` is the time in seconds to the next one."""
        from rich.text import Text

        if isinstance(found, WaltzError):
            found = partial(paragraph, text=" ".join(found.lines()), style="bold red")
        if self._live is None:
            found(self.out)
            self.out.print()
            return
        foot = f"Every {every:g} s; Ctrl-C ends."
        paper = self._paper()
        found(paper)
        assert isinstance(paper.file, io.StringIO)
        lines = paper.file.getvalue().splitlines()
        room = max(1, self.out.height - 1)
        if len(lines) > room:
            foot = f"{count(len(lines) - room, 'more line')} below the screen. {foot}"
        drawn = Text.from_ansi("\n".join(lines[:room]), no_wrap=True, overflow="ellipsis")
        drawn.append("\n" + foot, style="dim")
        self._live.update(drawn, refresh=True)

    def _paper(self) -> Console:
        """Return a console of the width and colours of the screen that captures its output."""
        from rich.console import Console

        return Console(
            file=io.StringIO(),
            width=self.out.width,
            height=self.out.height,
            force_terminal=True,
            no_color=self.out.no_color,
            color_system="auto" if self.out.color_system is None else self.out.color_system,  # type: ignore[arg-type]
            highlight=False,
            markup=False,
            emoji=False,
        )
