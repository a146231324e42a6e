"""A consumer group as it was made. The group log holds it, in the form of a document."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Protocol
from uuid import UUID

from waltzd.protocol.channels import Parts
from waltzd.protocol.document import ADDED, Document, Name, whole
from waltzd.protocol.groups import Exhausted, GroupPartitionStatus, KeyedBy, Mode
from waltzd.protocol.peers import AttendPort, ServerPort
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import FIRST

MS_MAX = 24 * 3600 * 1000
HEADERS_MAX = 64
BACK_OFF_MAX = 32
_HEADER_MAX = (1 << 31) - 1


@dataclass(frozen=True)
class GroupStart:
    partition: Annotated[int, whole()]
    after: Annotated[int, whole(-1)]
    """The group begins behind this id."""
    timeline: UUID | None = field(default=None, metadata={ADDED: True})
    """Identity of the timeline of the log in which that is an id; None for the first one."""

    @property
    def position(self) -> Position:
        return Position(self.after, self.timeline or FIRST)


@dataclass(frozen=True, kw_only=True)
class GroupMeta(Document):
    name: Name
    partitions: Parts | None
    """None: all of them."""
    mode: Mode
    ack_wait_ms: Annotated[int, whole(1, MS_MAX)] = 30_000
    max_in_flight: Annotated[int, whole(1, 100_000)] = 100
    """Of each member."""
    deliver_max: Annotated[int, whole(1, 1000)] = 5
    back_off_ms: tuple[Annotated[int, whole(0, MS_MAX)], ...] = (1000, 5000, 30_000)
    exhausted: Exhausted = Exhausted.PARK
    key: KeyedBy = KeyedBy.HEADER
    """Of a keyed group."""
    headers: tuple[Annotated[int, whole(-_HEADER_MAX - 1, _HEADER_MAX)], ...] = ()
    """It wants transactions with one of these headers; empty: all."""
    starts: tuple[GroupStart, ...] = ()
    """Where it begins in partitions; in one that is not named, at the first id."""

    def mistake(self) -> tuple[str, str] | None:
        if len(self.headers) > HEADERS_MAX:
            return "headers", f"must be at most {HEADERS_MAX} numbers, not {len(self.headers)}"
        if len(self.back_off_ms) > BACK_OFF_MAX:
            return "back_off_ms", f"must be at most {BACK_OFF_MAX} numbers, not {len(self.back_off_ms)}"
        if len({start.partition for start in self.starts}) < len(self.starts):
            return "starts", "must name each partition once"
        return None

    def start(self, partition: int) -> int:
        """The id behind which it begins there: a position, or -1."""
        return next((start.position for start in self.starts if start.partition == partition), -1)


@dataclass(frozen=True)
class MadeGroup:
    meta: GroupMeta
    made_at: int
    """The id of the entry that made it, in the group log: a group made later under its name is another one."""
    is_new: bool = False


@dataclass(frozen=True)
class GroupDescription:
    """A group as one server knows it."""

    meta: GroupMeta
    made_at: int
    places: tuple[GroupPartitionStatus, ...]
    """Where it has begun, or is at work."""


@dataclass(frozen=True)
class GroupList:
    """The groups that one server knows."""

    groups: tuple[GroupDescription, ...]
    trouble: str = ""
    """Why it knows nothing newer; empty: it knows all."""


class GroupPort(ServerPort, Protocol):
    """One server, as a client sees it, with what it does for consumer groups."""

    def attend(self) -> AttendPort: ...
    async def make_group(self, meta: GroupMeta) -> MadeGroup:
        """One that is there already with the same settings is answered as it is."""
        ...

    async def get_group(self, name: str) -> MadeGroup: ...
