"""Positions: an id together with the timeline in which it was seen. Pure.

Everything that an application stores about its progress in a log is a position: the mark of a view, the end of a file that
was read. After an operator has ended the log below an id, that id names another transaction (`waltzd.protocol.timelines`),
so a position contains the timeline as well. A plain integer is a position of the first timeline: in a log that never
forked it is all that is needed; in a log that forked, it is rejected above the fork and valid below.
"""

from __future__ import annotations

import re
from typing import Any, Self
from uuid import UUID

from waltzd.errors import BadArgument
from waltzd.protocol.timelines import FIRST, Fork, Lineage, Timeline


class Position(int):
    """A position in the log of a partition: an id, or -1 for the beginning, and the timeline in which the id was seen.

    It is an integer, so it can be used in place of an id. Code that stores a position must store its timeline as well: as
    `position.text`, or in a column of its own.

    Example:
        ```python
        row.position = transaction.position.text
        position = Position.parse(row.position)
        ```

    Attributes:
        timeline: Identity of the timeline; `UUID(int=0)` for the first one, with which every log begins.
    """

    timeline: UUID

    def __new__(cls, id: int, timeline: UUID | None = None) -> Self:
        """Make a position of an id.

        Args:
            id: The id, or -1.
            timeline: Identity of the timeline. Without one, that of `id` if it is a position, else the first timeline.
        """
        found = super().__new__(cls, id)
        found.timeline = timeline_of(id) if timeline is None else timeline
        return found

    def __repr__(self) -> str:
        return f"Position({self.text!r})"

    def __str__(self) -> str:
        return int.__repr__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self), self.timeline)

    @property
    def text(self) -> str:
        """The position as text: the id, then `@` and the timeline if that is not the first one."""
        return str(self) if self.timeline == FIRST else f"{self}@{self.timeline}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the position that `text` names.

        Args:
            text: What `Position.text` gave, or a plain number.

        Raises:
            BadArgument: The text is not a position.
        """
        found = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise BadArgument(f"{str(text)[:60]!r} is no position: it looks like 1024, or 1024@ and an identity")
        return cls(int(found[1]), FIRST if found[2] is None else UUID(found[2]))


_TEXT = re.compile(r"(-1|[0-9]{1,19})(?:@([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}))?", re.ASCII)


def timeline_of(position: int) -> UUID:
    """Return the timeline of a position; a plain integer belongs to the first one."""
    return position.timeline if isinstance(position, Position) else FIRST


def lineage_text(lineage: Lineage) -> str | None:
    """Return a lineage as one line for a database; None for a log that never forked."""
    return ",".join(f"{one.identity}:{one.number}:{one.parent}:{one.fork}:{one.session}" for one in lineage.later) or None


def lineage_of_text(text: str | None) -> Lineage:
    """Return the lineage that `lineage_text` wrote. Raises ValueError for anything else."""
    later = []
    for one in (text or "").split(",") if text else ():
        identity, *numbers = one.split(":")
        number, parent, fork, session = map(int, numbers)
        later.append(Timeline(number=number, identity=UUID(identity), parent=parent, fork=Fork(fork), session=session))
    return Lineage(later)
