"""The settings of a consumer group, which are a document in the group log, and the port to a server that has groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol
from uuid import UUID

from waltzd.protocol.channels import Parts
from waltzd.protocol.document import ADDED, WRITTEN, Document, Name, whole
from waltzd.protocol.groups import Changed, Exhausted, GroupPartitionStatus, GroupStatus, KeyedBy, Mode, ParkedList
from waltzd.protocol.peers import AttendPort, ServerPort
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import FIRST

MS_MAX = 24 * 3600 * 1000
KINDS_MAX = 64
BACK_OFF_MAX = 32
_KIND_MAX = (1 << 31) - 1


@dataclass(frozen=True)
class GroupStart:
    """The position at which a group begins in one partition."""

    partition: Annotated[int, whole()]
    after: Annotated[int, whole(-1)]
    """Id after which the group begins; -1 for the first transaction."""
    timeline: UUID | None = field(default=None, metadata={ADDED: True})
    """Identity of the timeline that `after` belongs to; None for the first timeline."""

    @property
    def position(self) -> Position:
        return Position(self.after, self.timeline or FIRST)


@dataclass(frozen=True, kw_only=True)
class GroupMeta(Document):
    """The settings of a consumer group."""

    name: Name
    partitions: Parts | None
    """Partitions of the group, by numbers and channels; None for all."""
    mode: Mode
    ack_wait_ms: Annotated[int, whole(1, MS_MAX)] = 30_000
    """Milliseconds after which a delivery without an acknowledgement is retried."""
    max_in_flight: Annotated[int, whole(1, 100_000)] = 100
    """Limit of deliveries in flight for each member."""
    deliver_max: Annotated[int, whole(1, 1000)] = 5
    """Number of tries before `exhausted` applies."""
    back_off_ms: tuple[Annotated[int, whole(0, MS_MAX)], ...] = (1000, 5000, 30_000)
    exhausted: Exhausted = Exhausted.PARK
    key: KeyedBy = KeyedBy.KIND
    """Source of the key of a transaction; used by keyed groups only."""
    kinds: tuple[Annotated[int, whole(-_KIND_MAX - 1, _KIND_MAX)], ...] = field(default=(), metadata={WRITTEN: "headers"})
    """Kinds of the transactions that are delivered; empty for all transactions."""
    starts: tuple[GroupStart, ...] = ()
    """Positions at which the group begins; it begins at the first id of a partition that is not named."""

    def mistake(self) -> tuple[str, str] | None:
        if len(self.kinds) > KINDS_MAX:
            return "kinds", f"must be at most {KINDS_MAX} numbers, not {len(self.kinds)}"
        if len(self.back_off_ms) > BACK_OFF_MAX:
            return "back_off_ms", f"must be at most {BACK_OFF_MAX} numbers, not {len(self.back_off_ms)}"
        if len({start.partition for start in self.starts}) < len(self.starts):
            return "starts", "must name each partition once"
        return None

    def start(self, partition: int) -> int:
        """Return the position after which the group begins in a partition, or -1."""
        return next((start.position for start in self.starts if start.partition == partition), -1)


@dataclass(frozen=True)
class MadeGroup:
    meta: GroupMeta
    made_at: int
    """Id of the entry that created the group in the group log; a group that is created again has another one."""
    is_new: bool = False
    """Whether the call that returned this value created the group."""


@dataclass(frozen=True)
class GroupDescription:
    """The state of a group on one server."""

    meta: GroupMeta
    made_at: int
    places: tuple[GroupPartitionStatus, ...]
    """State of the group in each partition in which it has begun."""


@dataclass(frozen=True)
class GroupList:
    """The groups on one server."""

    groups: tuple[GroupDescription, ...]
    trouble: str = ""
    """Reason why newer entries of the group log are missing; empty if none is."""


class GroupPort(ServerPort, Protocol):
    """The calls that one server answers, including those for consumer groups."""

    def attend(self) -> AttendPort: ...
    async def make_group(self, meta: GroupMeta) -> MadeGroup:
        """Create a group; return the existing one if it has the same settings."""
        ...

    async def get_group(self, name: str) -> MadeGroup: ...
    async def group_status(self, name: str, partition: int) -> GroupStatus: ...
    async def parked(self, name: str, partition: int, after: int, count: int) -> ParkedList: ...
    async def replay(self, name: str, partition: int, ids: Sequence[int]) -> Changed: ...
