"""How far each replica is in one session, and what is committed by that. Pure.

A `Progress` is all that the owner knows of one replica for as long as one session lasts: what the storage said, what it
was sent, what it acknowledged and what counts of that. Recovery, the marks and the replica's link read and write the same
one, so that they cannot disagree. A new session starts with new ones: what a replica acknowledged in the last session says
nothing about this one.

`Marks` is what is committed in an open session: the highest mark that a majority of its members has on disk.
Rule 1: only members that the saved document says have joined are counted, and the majority is that of all members.
Rule 2: the committed mark only rises, whatever a replica says later.
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
    """Where it stood before we opened it; None also when its storage, which was asked, holds nothing of the partition."""
    was_tried: bool = False
    """It answered, or failed to, at least once."""
    status: ReplicaStatus | None = None
    """What it said last; None while it is silent."""
    held: int = EMPTY
    """The last id on its disk, as far as we were told."""
    copied: int | None = None
    """Up to here it has got the log from us since it was opened."""
    sent: int = EMPTY
    """The last id on the open append stream."""
    told: int = EMPTY
    """The committed mark that it knows."""
    durable: int | None = None
    """Up to here its acknowledgements count; None while they do not count at all."""
    acknowledged: int = EMPTY
    """The most that it ever acknowledged while it counted: if it holds less afterwards, it has forgotten something."""
    has_forgotten: bool = False
    """It has forgotten something, and that is not saved yet."""
    trimmed: int = 0
    """The floor that it was given since it was opened; its own may be lower, because it keeps whole segments."""
    copied_end: object = None
    """What the log was seen to end with when this one had copied up to the mark."""
    diverged: tuple[UUID, str] | None = None
    """It holds another history than the log: which directory does, and how that was seen."""

    def check(self) -> None:
        assert self.status is None or self.was_tried
        assert self.was_asked or self.before is None
        assert not (self.has_forgotten and self.durable is not None), "the forgetful do not count"
        if self.durable is not None:
            assert self.durable <= self.acknowledged
            assert self.status is None or self.durable <= self.held, "what counts is on its disk"


def is_bound(status: ReplicaStatus, incarnation: UUID | None, session: int) -> bool:
    """Whether it has joined this session, and has promised itself to no newer one. One whose disk was replaced may have
    forgotten a promise."""
    return status.promised_session == session == status.session and status.incarnation == incarnation


def print_of(end: End | None) -> object:
    """What is compared of it. The checksum is that of a head, which names the one in front of it."""
    return None if end is None else (end.crc, end.time)


def certain_of(status: ReplicaStatus, mark: int) -> int:
    """Up to here nothing is ever cut on this replica. It can know of more than the mark of an open session only from that
    session itself, when it has forgotten since that it had begun it."""
    return max(mark, status.committed)


class Marks:
    def __init__(self, progress: Mapping[str, Progress], joined: Sequence[str], low_mark: int) -> None:
        """`progress` is that of the members."""
        assert progress
        assert set(joined) <= set(progress)
        self.members = tuple(progress)
        self.committed = self._low_mark = low_mark
        self._progress = progress
        self.lease: Lease | None = None
        """How long the owner need not ask whether it was replaced; None where it always does."""
        for name in joined:
            progress[name].durable = progress[name].acknowledged = low_mark

    @property
    def counted(self) -> tuple[str, ...]:
        """The members whose acknowledgements count."""
        return tuple(name for name, progress in self._progress.items() if progress.durable is not None)

    @property
    def acknowledged(self) -> dict[str, int]:
        """The most that each member ever acknowledged while it counted."""
        return {name: progress.acknowledged for name, progress in self._progress.items()}

    def counts(self, name: str) -> bool:
        return name in self._progress and self._progress[name].durable is not None

    def missing(self, readable: Collection[str]) -> str:
        """Why nothing can be committed with these replicas, in one sentence; empty when it can."""
        writable = [name for name in self.counted if name in readable]
        if len(writable) >= majority(len(self.members)):
            return ""
        others = [name for name in self.members if name not in writable]
        return f"no majority takes appends: {', '.join(others)} of {', '.join(self.members)} do not"

    def confirms(self, bound: Collection[str]) -> bool:
        """Whether these are so many that no newer session had opened when they said that they are bound to this one."""
        return sum(name in bound for name in self.counted) >= majority(len(self.members))

    def join(self, name: str, mark: int) -> bool:
        """Saved: it counts from now on, and has this much on disk. True when the committed mark rose."""
        progress = self._progress[name]
        progress.durable, progress.acknowledged = mark, max(mark, progress.acknowledged)
        return self._commit()

    def lose(self, name: str) -> None:
        """It has forgotten something: nothing that it says counts any more."""
        self._progress[name].durable = None

    def acknowledge(self, name: str, mark: int) -> bool:
        """It says that everything up to `mark` is on its disk. True when the committed mark rose."""
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
        """What is committed was acknowledged by a majority of all members while they counted."""
        assert self.committed >= self._low_mark
        if self.committed > self._low_mark:
            assert reached(self.acknowledged.values(), len(self.members)) >= self.committed
