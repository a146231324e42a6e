"""Timelines: which history of a partition's log an id belongs to. Pure.

A log normally has one history. An operator's rescue, a restore to a moment, or documents put back with a loss end it below
an id that was acknowledged once; afterwards the same ids name other transactions. The log then goes on under another
*timeline*, as in PostgreSQL. A timeline has a random identity and forks from its parent behind the last id that both share.

The first timeline of every log has the identity `FIRST` and is written nowhere, so a log that never forked looks as it
did before there were timelines. All later ones form a `Lineage`, which the partition's document, every replica, the
archive and every mounted client carry. Whatever remembers an id also remembers the identity of the timeline in which it
saw that id.

Rule: a position (identity, id) is valid in a lineage up to `shared_to(identity)`. Up to there its transaction is the same
one; above it, another transaction has the id now, or none. An identity that the lineage does not have shares nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NewType
from uuid import UUID

from waltzd.errors import OtherTimeline
from waltzd.protocol.quorum import EMPTY

FIRST = UUID(int=0)
"""Identity of the timeline with which every log begins."""
TIMELINES_MAX = 64
"""Timelines of one partition: they have to fit into one page of the promise file."""
Fork = NewType("Fork", int)
"""Last id that two timelines share; -1 when they share nothing."""
_ENTRY = struct.Struct(">16siiqq")


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One history of a log, other than the first."""

    identity: UUID
    number: int
    """2 for the first fork; each later timeline of the log has a higher number."""
    parent: int
    """Number of the timeline from which it forked; 1 is the first timeline."""
    fork: Fork
    """Last id that it shares with its parent."""
    session: int
    """Session that the operator's command took to end the parent. Every session of this timeline is this one or a
    later one."""
    cause: str | None = None
    """Command that began it, for people; None where only storages remember the timeline."""
    began: str | None = None
    """When, in ISO 8601, for people."""
    who: str | None = None
    """Who gave the command, for people."""

    @property
    def bare(self) -> Timeline:
        """Return it without the texts for people, as replicas and clients know it."""
        return replace(self, cause=None, began=None, who=None)


class Lineage:
    """All timelines of a log; the last one is the current timeline.

    Invariant: numbers rise, identities differ, each parent has a lower number, and sessions never fall.
    """

    __slots__ = ("later",)

    def __init__(self, later: Iterable[Timeline] = ()) -> None:
        """`later` are the timelines behind the first one, in order. Raises ValueError where they are no lineage."""
        self.later = tuple(later)
        if (mistake := lineage_mistake(self.later)) is not None:
            raise ValueError(mistake)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lineage) and [one.bare for one in self.later] == [one.bare for one in other.later]

    def __hash__(self) -> int:
        return hash(self.current)

    @property
    def current(self) -> UUID:
        return self.later[-1].identity if self.later else FIRST

    @property
    def number(self) -> int:
        """Number of the current timeline."""
        return self.later[-1].number if self.later else 1

    @property
    def fork(self) -> int:
        """Last id that the current timeline shares with its parent; -1 for the first timeline."""
        return self.later[-1].fork if self.later else EMPTY

    def __contains__(self, identity: UUID) -> bool:
        return identity == FIRST or any(one.identity == identity for one in self.later)

    def get(self, identity: UUID) -> Timeline | None:
        return next((one for one in self.later if one.identity == identity), None)

    def number_of(self, identity: UUID) -> int | None:
        """Return the number of this timeline; None where the lineage does not have it."""
        if identity == FIRST:
            return 1
        found = self.get(identity)
        return None if found is None else found.number

    def _path(self) -> Iterator[tuple[int, int | None]]:
        """Yield the current timeline and its ancestors: number, and the last id up to which the log is in it or in one of
        its ancestors; None for no bound."""
        by_number = {one.number: one for one in self.later}
        number, shared = self.number, None
        while True:
            yield number, shared
            found = by_number.get(number)
            if found is None:
                return
            shared = found.fork if shared is None else min(shared, found.fork)
            number = found.parent

    def shared_to(self, identity: UUID) -> int | None:
        """Return the last id up to which that timeline and the current one are the same history: None without a bound,
        because it is the current one; -1 where they share nothing, or the lineage does not have it."""
        number = self.number_of(identity)
        if number is None:
            return EMPTY
        path = dict(self._path())
        by_number = {one.number: one for one in self.later}
        least: int | None = None
        while number not in path:  # an abandoned branch: up to where it left the path
            fork = by_number[number].fork
            least = fork if least is None else min(least, fork)
            number = by_number[number].parent
        on_path = path[number]
        if least is None or on_path is None:
            return on_path if least is None else least
        return min(least, on_path)

    def covers(self, identity: UUID, id_: int) -> bool:
        """Whether an id that was seen in that timeline names the same transaction in the current one."""
        shared = self.shared_to(identity)
        return identity in self and (shared is None or id_ <= shared)

    def check(self, identity: UUID, id_: int, *, what: str, partition: int, next_step: str = "") -> None:
        """Raise `OtherTimeline` where `what`, which stands at this id of that timeline, is on another history."""
        if id_ == EMPTY or self.covers(identity, id_):
            return
        shared, number = self.shared_to(identity), self.number_of(identity)
        if number is None:
            reason = f"on timeline {identity}, which this log never had"
        else:
            reason = f"on timeline {number}; the log forked behind id {shared}, and goes on under timeline {self.number}"
        raise OtherTimeline(
            f"{what} stands at id {id_} of partition {partition} {reason}",
            next_step=next_step, partition=partition, fork=shared, position=id_, timeline=self.current,
        )  # fmt: skip

    def forked(
        self,
        *,
        identity: UUID,
        fork: int,
        session: int,
        parent: UUID | None = None,
        cause: str,
        began: str,
        who: str | None,
    ) -> Lineage:
        """Return the lineage with one more timeline, which forks behind this id from the current timeline or `parent`."""
        number = self.number if parent is None else self.number_of(parent)
        assert number is not None, "a timeline forks from one that the log has"
        new = Timeline(
            number=self.number + 1, identity=identity, parent=number, fork=Fork(fork), session=session, cause=cause,
            began=began, who=who,
        )  # fmt: skip
        return Lineage((*self.later, new))

    # -- as bytes, in the promise of a replica

    def encode(self) -> bytes:
        return b"".join(
            _ENTRY.pack(one.identity.bytes, one.number, one.parent, one.fork, one.session) for one in self.later
        )

    @staticmethod
    def decode(raw: bytes) -> Lineage | None:
        """Return None where `raw` is no lineage."""
        if len(raw) % _ENTRY.size:
            return None
        rows = [_ENTRY.unpack_from(raw, at) for at in range(0, len(raw), _ENTRY.size)]
        later = [
            Timeline(number=number, identity=UUID(bytes=identity), parent=parent, fork=Fork(fork), session=session)
            for identity, number, parent, fork, session in rows
        ]
        return None if lineage_mistake(later) is not None else Lineage(later)


def lineage_mistake(later: Iterable[Timeline]) -> str | None:
    """Return why these timelines are no lineage; None where they are one."""
    before, session, identities = 1, 0, {FIRST}
    numbers = {1}
    for count, one in enumerate(later, 1):
        if count > TIMELINES_MAX:
            return f"has more than {TIMELINES_MAX} timelines"
        if one.number <= before:
            return f"has timeline {one.number} behind timeline {before}"
        if one.identity in identities:
            return f"has the identity {one.identity} twice"
        if one.parent not in numbers:
            return f"has timeline {one.number} with the parent {one.parent}, which is not in front of it"
        if one.fork < EMPTY or one.session < session:
            return f"has timeline {one.number} with fork {one.fork} and session {one.session}"
        before, session = one.number, one.session
        identities.add(one.identity)
        numbers.add(one.number)
    return None


NEVER_FORKED = Lineage()
