"""Timelines: the history of a partition's log that an id belongs to. Pure.

A log normally has one history. An operator can end it below an id that was acknowledged: by a rescue, by a restore to a
point in time, or by restoring documents with a loss. Later transactions then get the same ids again. The log continues
under another *timeline*, as in PostgreSQL. A timeline has a random identity, and forks from its parent after the last id
that both share.

The first timeline of every log has the identity `FIRST` and is not stored anywhere, so a log that never forked has no trace
of timelines. The later ones form a `Lineage`, which is in the partition's document, in every replica, in the archive and in
every mounted client. Everything that stores an id also stores the identity of the timeline in which it saw that id.

Rule: a position (identity, id) is valid in a lineage up to `shared_to(identity)`. Up to there it names the same
transaction; above, another transaction has the id, or none. An identity that is not in the lineage shares nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NewType
from uuid import UUID

from waltzd.errors import OtherTimeline
from waltzd.errors.operations import Unsafe
from waltzd.protocol.quorum import EMPTY

FIRST = UUID(int=0)
"""Identity of the first timeline of every log."""
TIMELINES_MAX = 64
"""Largest number of timelines of a partition: they have to fit into one page of the hard-state file."""
Fork = NewType("Fork", int)
"""Last id that two timelines share; -1 when they share nothing."""
_ENTRY = struct.Struct(">16siiqq")


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One history of a log, other than the first."""

    identity: UUID
    number: int
    """Number of the timeline: 2 for the first fork, and rising."""
    parent: int
    """Number of the parent, from which the timeline forked; 1 is the first timeline."""
    fork: Fork
    """Last id that the timeline shares with its parent."""
    session: int
    """Session that the operator's command took to end the parent. No session of this timeline is older."""
    cause: str | None = None
    """Command that began the timeline, for people; None if only storages have stored the timeline."""
    began: str | None = None
    """Time at which the timeline began, in ISO 8601, for people."""
    who: str | None = None
    """Operator of the command, for people."""

    @property
    def bare(self) -> Timeline:
        """The timeline without the texts for people, as replicas and clients store it."""
        return replace(self, cause=None, began=None, who=None)


class Lineage:
    """All timelines of a log; the last one is the current timeline.

    Invariant: numbers rise, identities differ, each parent has a lower number, and sessions never fall.
    """

    __slots__ = ("later",)

    def __init__(self, later: Iterable[Timeline] = ()) -> None:
        """`later`: the timelines after the first one, in order. Raise ValueError if they are not a valid lineage."""
        self.later = tuple(later)
        if (mistake := lineage_mistake(self.later)) is not None:
            raise ValueError(mistake)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lineage) and [one.bare for one in self.later] == [one.bare for one in other.later]

    def __hash__(self) -> int:
        return hash(self.current)

    def continues(self, other: Lineage) -> bool:
        """Return whether this is the other lineage, or the other one with later timelines."""
        return Lineage(self.later[: len(other.later)]) == other

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
        """Return the number of a timeline; None if it is not in the lineage."""
        if identity == FIRST:
            return 1
        found = self.get(identity)
        return None if found is None else found.number

    def _path(self) -> Iterator[tuple[int, int | None]]:
        """Yield the number of the current timeline and of each ancestor, with the last id up to which the log is on that
        timeline or its ancestors; None for no limit."""
        by_number = {one.number: one for one in self.later}
        number, shared = self.number, None
        yield number, shared
        while (found := by_number.get(number)) is not None:
            shared = found.fork if shared is None else min(shared, found.fork)
            number = found.parent
            yield number, shared

    def shared_to(self, identity: UUID) -> int | None:
        """Return the last id that a timeline shares with the current one.

        None, for no limit, if it is the current timeline; -1 if they share nothing, or it is not in the lineage."""
        number = self.number_of(identity)
        if number is None:
            return EMPTY
        path = dict(self._path())
        by_number = {one.number: one for one in self.later}
        least: int | None = None
        while number not in path:  # on an abandoned branch: go back to where it left the path
            fork = by_number[number].fork
            least = fork if least is None else min(least, fork)
            number = by_number[number].parent
        on_path = path[number]
        if least is None or on_path is None:
            return on_path if least is None else least
        return min(least, on_path)

    def covers(self, identity: UUID, id_: int) -> bool:
        """Return whether an id of a timeline names the same transaction in the current timeline."""
        shared = self.shared_to(identity)
        return identity in self and (shared is None or id_ <= shared)

    def check(self, identity: UUID, id_: int, *, what: str, partition: int, next_step: str = "") -> None:
        """Raise `OtherTimeline` if `what`, whose position is this id of this timeline, is not on the current log."""
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

    def check_room(self, partition: int) -> None:
        """Raise `Unsafe` if the log cannot be forked once more."""
        if len(self.later) >= TIMELINES_MAX:
            raise Unsafe(
                f"the log of partition {partition} has forked {len(self.later)} times, as often as it can",
                not_done="nothing was changed",
                next_step="start the storages that do not answer, if its owner can open it with them; else export what can "
                "be read, and append it to a new cluster",
            )

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
        """Return the lineage with a new timeline that forks after this id from the current timeline, or from `parent`."""
        number = self.number if parent is None else self.number_of(parent)
        assert number is not None, "the parent has to be a timeline of the log"
        new = Timeline(
            number=self.number + 1, identity=identity, parent=number, fork=Fork(fork), session=session, cause=cause,
            began=began, who=who,
        )  # fmt: skip
        return Lineage((*self.later, new))

    # -- as bytes, in the hard state of a replica

    def encode(self) -> bytes:
        return b"".join(
            _ENTRY.pack(one.identity.bytes, one.number, one.parent, one.fork, one.session) for one in self.later
        )

    @staticmethod
    def decode(raw: bytes) -> Lineage | None:
        """Decode a lineage; return None if `raw` is not a valid one."""
        if len(raw) % _ENTRY.size:
            return None
        rows = [_ENTRY.unpack_from(raw, at) for at in range(0, len(raw), _ENTRY.size)]
        later = [
            Timeline(number=number, identity=UUID(bytes=identity), parent=parent, fork=Fork(fork), session=session)
            for identity, number, parent, fork, session in rows
        ]
        return None if lineage_mistake(later) is not None else Lineage(later)


def lineage_mistake(later: Iterable[Timeline]) -> str | None:
    """Return the reason why these timelines are not a valid lineage; None if they are."""
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
