"""Progress of each replica in one session, and what is committed by it. Pure.

A `Progress` is all that the owner knows of one replica during one session: what it reported, what it was sent, what it
acknowledged and which acknowledgements count. Recovery, the marks and the replicator share one `Progress` for each
replica, so they cannot disagree. A new session starts with new ones: acknowledgements of the last session prove nothing
for this one.

`Marks` is what is committed in an open session: the highest mark that a majority of its members has on disk.
Rule 1: only members that have joined by the saved document are counted, and the majority is that of all members.
Rule 2: the committed mark only rises, whatever a replica reports later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from waltzd.format.batch import End
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.quorum import EMPTY, majority, reached
from waltzd.server.core.lease import Lease


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

    def join(self, name: str, mark: int) -> bool:
        """Count a member from now on, of which the document says that it joined. It holds everything up to `mark`. Return
        whether the committed mark rose."""
        progress = self._progress[name]
        progress.durable, progress.acknowledged = mark, max(mark, progress.acknowledged)
        return self._commit()

    def lose(self, name: str) -> None:
        """Stop counting a member that has forgotten something."""
        self._progress[name].durable = None

    def acknowledge(self, name: str, mark: int) -> bool:
        """Note that the member has everything up to `mark` on its disk. Return whether the committed mark rose."""
        progress = self._progress.get(name)
        if progress is None or progress.durable is None or mark <= progress.durable:
            return False
        progress.durable, progress.acknowledged = mark, max(mark, progress.acknowledged)
        return mark > self.committed and self._commit()

    def _commit(self) -> bool:
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
