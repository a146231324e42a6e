"""Consumer groups in a cluster: the settings of a group, the port to a server that has groups, and the documents of the
group log.

The settings of a group are an entry of the group log: one more log, in which the cluster stores the state of groups.

It has replicas, an owner, sessions and recovery like a partition; its number is the one after the last partition. It
exists if the assignment has one owner more than the cluster has partitions: in a new cluster from its creation
(`Cluster.create`), in an older one from its first group (`begin_group_log`). `ClusterMeta.partitions` does not count
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol
from uuid import UUID

from waltzd.cluster.assignment import UNOWNED
from waltzd.cluster.cluster import ASSIGNMENT, NO_VERSION, REPLICAS, STORAGES, Cluster, put, replicas_path
from waltzd.cluster.coordinator import Change, Check, Set
from waltzd.cluster.documents import Assignment, ClusterMeta, Membership, ReplicaSet
from waltzd.errors.operations import NodeMissing
from waltzd.protocol.channels import Parts
from waltzd.protocol.document import ADDED, WRITTEN, Document, Name, encode, whole
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


def has_group_log(assignment: Assignment, meta: ClusterMeta) -> bool:
    return len(assignment.owners) > meta.partitions


def logs_of(assignment: Assignment, meta: ClusterMeta) -> range:
    """Return the numbers of all logs: the partitions, and the group log if there is one."""
    return range(meta.partitions + has_group_log(assignment, meta))


async def begin_group_log(cluster: Cluster, meta: ClusterMeta, storages: Mapping[str, Membership]) -> bool:
    """Create the group log with replicas on these storages, in one transaction; return False if there is one already.

    Raises:
        ChangedMeanwhile: One of the documents changed at the same moment; read them again and retry.
    """
    assignment, version = await cluster.assignment()
    if has_group_log(assignment, meta):
        return False
    number, coordinator = meta.partitions, cluster.coordinator
    checks: list[Change] = []
    for path in (REPLICAS, *(f"{STORAGES}/{name}" for name in sorted(storages))):
        node = await coordinator.get(path)
        if node is None:
            raise NodeMissing(f"the coordinator has no document {path}", path=path)
        # a command that reads all replica sets has to notice the new one
        checks.append(Set(path, b"", node.version) if path == REPLICAS else Check(path, node.version))
    node = await coordinator.get(replicas_path(number))
    before = NO_VERSION if node is None else node.version
    owners = Assignment(owners=(*assignment.owners, UNOWNED))
    await coordinator.commit(
        [
            *checks,
            put(replicas_path(number), encode(ReplicaSet(storages)), before),
            Set(ASSIGNMENT, encode(owners), version),
        ]
    )
    return True
