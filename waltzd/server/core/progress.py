"""Progress of each replica in one session, and what is committed by it. Pure.

A `Progress` is all that the owner knows of one replica during one session: what it reported, what it was sent, what it
acknowledged and which acknowledgements count. Recovery, the marks and the replicator share one `Progress` for each
replica, so they cannot disagree. A new session starts with new ones: acknowledgements of the last session prove nothing
for this one.

`Marks` is what is committed in an open session: the highest mark that a majority of its members has on disk.
Rule 1: only members that took part when the session opened, by the saved document, are counted, and the majority is that
of all members. A member that comes later counts from the next session on: if the list grew while a session writes, a
coordinator that goes back to the shorter list would hide from the next owner whose acknowledgements were counted.
Rule 2: the committed mark only rises, whatever a replica reports later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from waltzd.format.batch import End
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.quorum import EMPTY, majority, reached

OUTLASTS = 2
"""Number of leases of the former owner that a new owner waits for. No clock runs this many times as fast as another
clock."""


class Lease:
    """The lease of an open session: how long its owner answers confirmed reads without asking its storages again. Pure.

    How to think about it. A storage that confirms our session was not fenced by a newer one when we asked. When a
    majority confirms, no other server was the owner at the moment of our question. An acknowledgement of an append
    confirms as well as an answer to a question: the log is the lease. From that question on the owner trusts its own
    committed mark for `seconds`.

    Why that is safe. A newer session opens only when it has fenced a majority. One storage of that majority answered us
    first; so our question is older than the moment at which the new owner knows its majority. The new owner waits from that
    moment for twice our lease before its log opens (`session.session`). Until then it reports nothing as committed, and
    afterwards our lease has ended. The document of the partition holds the length of the lease, so the new owner knows it
    whatever its own settings are.

    Rule 1: the time counts from before the question left, never from the answer.
    Rule 2: a question that is asked while the session gives way to the next one does not renew the lease: a new owner need
    not ask the storages of the old session (`session.confirmation`).
    Rule 3: only answers of members whose acknowledgements count are used, and the majority is that of all members.

    Assumptions about clocks: each clock only rises, and none runs twice as fast as another. The time of day is not
    used. The time of an event loop is not used either, because it stands still within a turn: a process that was
    stopped in a turn would treat a read that came meanwhile as an earlier one. A process that is stopped finds its
    lease ended when it continues. A process that is stopped between the check of the lease and its answer answers late
    but correctly: the read was there before that check, and the mark was the newest then.

    A machine that is stopped as a whole, with its clock (a virtual machine that is suspended, or put back), breaks the
    assumption: it may answer an old mark for the length of a lease after it continues. A question to the storages has
    no such case. Therefore there is no lease unless an operator sets one.
    """

    def __init__(self, members: int, seconds: float) -> None:
        """`members`: the number of all members, including those whose acknowledgements do not count."""
        self.seconds = seconds
        self._members = members
        self._asked: dict[str, float] = {}
        """Member to the time of our newest question that it answered by confirming our session."""

    def renew(self, name: str, asked_at: float) -> None:
        """Record that the member was bound to this session at some moment after `asked_at`."""
        self._asked[name] = max(asked_at, self._asked.get(name, asked_at))

    def holds(self, counted: Collection[str], now: float) -> bool:
        """Return whether the lease is valid. `counted`: the members whose acknowledgements count now."""
        asked = sorted((self._asked[name] for name in counted if name in self._asked), reverse=True)
        needed = majority(self._members)
        return len(asked) >= needed and now < asked[needed - 1] + self.seconds


@dataclass(slots=True)
class Progress:
    was_asked: bool = False
    before: ReplicaStatus | None = None
    """Status before this session opened it; None if it was not asked, or holds nothing of the partition."""
    was_tried: bool = False
    """Whether the replica answered or failed to answer at least once."""
    status: ReplicaStatus | None = None
    """Its newest status; None while it is silent."""
    held: int = EMPTY
    """Last id on its disk, as far as it was reported."""
    copied: int | None = None
    """Id up to which it has copied the log from us since it was opened; None if it has copied nothing."""
    sent: int = EMPTY
    """Last id that was sent on the open append stream."""
    told: int = EMPTY
    """Committed mark that it was told."""
    durable: int | None = None
    """Id up to which its acknowledgements count; None while they do not count."""
    acknowledged: int = EMPTY
    """Highest id that it acknowledged while its acknowledgements counted. If it holds less afterwards, it has forgotten
    something."""
    has_forgotten: bool = False
    """Whether the replica has forgotten something that is not saved in the document yet."""
    trimmed: int = 0
    """Floor that it was told since it was opened. Its own floor may be lower, because it keeps whole segments."""
    copied_end: object = None
    """End of the log as known when this replica had copied up to the mark."""
    diverged: tuple[UUID, str] | None = None
    """Incarnation of its directory, and how it was found to hold another history than the log; None if it was not."""

    def check(self) -> None:
        assert self.status is None or self.was_tried
        assert self.was_asked or self.before is None
        assert not (self.has_forgotten and self.durable is not None), "the forgetful do not count"
        if self.durable is not None:
            assert self.durable <= self.acknowledged
            assert self.status is None or self.durable <= self.held, "what counts is on its disk"


def is_bound(status: ReplicaStatus, incarnation: UUID | None, session: int) -> bool:
    """Return whether a replica has joined this session and is fenced by no newer one. A replica whose disk was replaced
    may have forgotten that it was fenced."""
    return status.promised_session == session == status.session and status.incarnation == incarnation


def print_of(end: End | None) -> object:
    """Return the parts of an end that are compared. The checksum is that of a batch's head, which includes the checksum
    of the batch before."""
    return None if end is None else (end.crc, end.time)


def certain_of(status: ReplicaStatus, mark: int) -> int:
    """Return the id up to which nothing is ever cut on this replica: `mark`, at which the session opens, or the committed
    mark of the replica. That is higher only if the replica was already in this session and lost the record of it."""
    return max(mark, status.committed)


class Marks:
    def __init__(self, progress: Mapping[str, Progress], joined: Sequence[str], low_mark: int) -> None:
        """`progress`: progress of all members. `joined`: members whose acknowledgements count."""
        assert progress
        assert set(joined) <= set(progress)
        self.members = tuple(progress)
        self.committed = self._low_mark = low_mark
        self._progress = progress
        self.lease: Lease | None = None
        """Lease within which the owner answers confirmed reads without asking; None if there is no lease."""
        for name in joined:
            progress[name].durable = progress[name].acknowledged = low_mark

    @property
    def counted(self) -> tuple[str, ...]:
        """Members whose acknowledgements count."""
        return tuple(name for name, progress in self._progress.items() if progress.durable is not None)

    @property
    def acknowledged(self) -> dict[str, int]:
        """Highest id that each member acknowledged while its acknowledgements counted."""
        return {name: progress.acknowledged for name, progress in self._progress.items()}

    def counts(self, name: str) -> bool:
        return name in self._progress and self._progress[name].durable is not None

    def missing(self, readable: Collection[str]) -> str:
        """Return in one sentence why nothing can be committed with these replicas; empty if it can."""
        writable = [name for name in self.counted if name in readable]
        if len(writable) >= majority(len(self.members)):
            return ""
        others = [name for name in self.members if name not in writable]
        return f"no majority of {', '.join(self.members)} takes appends: not {', '.join(others)}"

    def confirms(self, bound: Collection[str]) -> bool:
        """Return whether these members prove that no newer session had opened when they confirmed ours."""
        return sum(name in bound for name in self.counted) >= majority(len(self.members))

    def lose(self, name: str) -> None:
        """Stop counting a member that has forgotten something."""
        self._progress[name].durable = None

    def acknowledge(self, name: str, mark: int) -> bool:
        """Note that the member has everything up to `mark` on its disk. Return whether the committed mark rose."""
        progress = self._progress.get(name)
        if progress is None or progress.durable is None or mark <= progress.durable:
            return False
        progress.durable, progress.acknowledged = mark, max(mark, progress.acknowledged)
        if mark <= self.committed:
            return False
        durable = [progress.durable for progress in self._progress.values() if progress.durable is not None]
        mark = reached(durable, len(self.members))
        if mark <= self.committed:
            return False
        self.committed = mark
        return True

    def check(self) -> None:
        """Assert that a majority of all members acknowledged what is committed, while they counted."""
        assert self.committed >= self._low_mark
        if self.committed > self._low_mark:
            assert reached(self.acknowledged.values(), len(self.members)) >= self.committed
