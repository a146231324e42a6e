"""Snapshot of a cluster as one value: what its documents in ZooKeeper hold, and what its daemons report of themselves.

The answers are collected a moment apart (`collector`), so a snapshot may contradict itself while a cluster changes. A
daemon that does not answer is in the snapshot too, with the error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from waltzd.cluster.documents import ClusterMeta, Membership, ServerMeta, StorageMeta
from waltzd.errors import CannotConnect, WaltzError
from waltzd.protocol.descriptions import OwnedPartition, PartitionDescription, ServerDescription, StorageDescription
from waltzd.protocol.groups import GroupTotals
from waltzd.protocol.quorum import majority
from waltzd.protocol.timelines import Timeline

OPEN = "OPEN"
_ADDED = ("members", "in_flight", "lag", "parked", "stopped", "paused", "unattended")
"""Fields of `GroupTotals` that each server counts for the partitions it owns, and that are summed over all servers."""


def silence(error: WaltzError) -> str:
    """Return the verb phrase for an unanswered call: "does not answer" if nothing was reachable, else "refuses to
    answer"."""
    return "does not answer" if isinstance(error, CannotConnect) else "refuses to answer"


def silent_servers(found: Mapping[str, WaltzError]) -> list[str]:
    """Return one sentence for each server that did not answer."""
    return [
        f"server {name} {silence(error)}, and may know more: {error.code} {error.message}" for name, error in found.items()
    ]


def timeline_sentence(one: Timeline) -> str:
    """Describe a timeline: cause, time, operator and session of its begin, and the id at which it left its parent."""
    how = f" by {one.cause}" if one.cause else ""
    when = f" at {one.began}" if one.began else ""
    by = f" ({one.who})" if one.who else ""
    return (
        f"timeline {one.number}: begun{how}{when}{by} in session {one.session:,}; it shares timeline {one.parent} up to id "
        f"{one.fork:,}, and what that had above was given up"
    )


@dataclass(frozen=True, kw_only=True)
class Call:
    """Time of one call to a daemon. The duration includes connecting if no connection was open."""

    middle_ms: float = 0.0
    """Milliseconds since 1970 on the clock of this machine, half way between question and answer."""
    milliseconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ServerView:
    meta: ServerMeta
    reported: ServerDescription | None
    error: WaltzError | None
    call: Call = Call()


@dataclass(frozen=True, kw_only=True)
class StorageView:
    meta: StorageMeta
    reported: StorageDescription | None
    error: WaltzError | None
    call: Call = Call()

    def replica(self, number: int) -> PartitionDescription | None:
        """Return what the storage reports of its replica of a partition; None if it has none or does not answer."""
        held = self.reported.assigned if self.reported is not None else ()
        return next((one for one in held if one.partition == number), None)

    def serves(self, number: int) -> bool:
        one = self.replica(number)
        return one is not None and one.refused is None and (one.status is None or one.status.is_available)


@dataclass(frozen=True, kw_only=True)
class PartitionView:
    partition: int
    owner: str | None
    generation: int
    replicas: Mapping[str, Membership]
    reported: OwnedPartition | None
    """Report of the partition's owner; None if there is no owner or it does not answer."""
    is_group_log: bool = False
    """Whether this is the group log, which holds the positions of consumer groups and no transactions of applications."""
    refusing: frozenset[str] = frozenset()
    """Storages that answer and do not serve this replica, because it was taken offline, is refused or is missing. An
    owner notices this only at its next write; a snapshot asks both sides and therefore knows it earlier."""

    @property
    def is_open(self) -> bool:
        """Return whether the partition takes transactions: its owner says so, and most of its replicas are served."""
        return self.owner_says_open and not self._lacks_majority

    @property
    def owner_says_open(self) -> bool:
        return self.reported is not None and self.reported.step == OPEN and not self.reported.waiting

    @property
    def counted(self) -> frozenset[str]:
        """Storages whose acknowledgements count towards a commit."""
        replicas = self.reported.replicas if self.reported is not None else ()
        return frozenset(replica.storage for replica in replicas if replica.counts) - self.refusing

    @property
    def counting(self) -> int:
        return len(self.counted)

    @property
    def format(self) -> int | None:
        """Segment format that the current session writes; None while no session is open."""
        return self.reported.format if self.reported is not None and self.reported.step == OPEN else None

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """Timelines of the log after the first one, as its owner reports them."""
        return () if self.reported is None else self.reported.timelines

    @property
    def state(self) -> str:
        """State of the partition in one word."""
        if self.reported is None:
            return "unknown"
        return "open" if self.is_open else "waiting" if self.reported.step == OPEN else self.reported.step.lower()

    @property
    def waiting(self) -> str:
        """Reason why the partition is not open, in one sentence; empty if it is open."""
        if not self.owner_says_open or not self._lacks_majority:
            return self.owner_waiting
        members = self._members
        some, total = len(self.counted & members), len(members)
        return (
            f"{some} of {total} replicas can take them, and {majority(total)} have to: {', '.join(sorted(self.refusing))} "
            f"{'does' if len(self.refusing) == 1 else 'do'} not serve, which an owner notices when it writes there"
        )

    @property
    def owner_waiting(self) -> str:
        """Reason why the partition is not open, as far as its owner knows; empty if it is open."""
        if self.owner is None:
            return "no server owns it"
        if self.reported is None:
            return f"its owner {self.owner} does not report its state"
        return "" if self.owner_says_open else self.reported.waiting or f"{self.owner} is recovering it"

    @property
    def _members(self) -> frozenset[str]:
        return frozenset(name for name, role in self.replicas.items() if role is Membership.MEMBER)

    @property
    def _lacks_majority(self) -> bool:
        """Return whether too few replicas are left for a majority, without those that storages do not serve."""
        return bool(self.refusing) and len(self.counted & self._members) < majority(len(self._members))


@dataclass(frozen=True, kw_only=True)
class ClusterSnapshot:
    meta: ClusterMeta
    leader: str | None
    servers: tuple[ServerView, ...]
    storages: tuple[StorageView, ...]
    partitions: tuple[PartitionView, ...]
    moves: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Partition → storages that shall hold it, for each partition with a move in progress."""
    missing: tuple[ServerMeta, ...] = ()
    """Servers that are expected and not registered, with the addresses of their last registration."""
    unreadable: Mapping[str, WaltzError] = field(default_factory=dict)
    """Documents in ZooKeeper that cannot be decoded: path → error."""

    @property
    def logs(self) -> range:
        """Numbers of all partitions, and of the group log if there is one."""
        return range(max(self.meta.partitions, min(len(self.partitions), self.meta.partitions + 1)))

    @property
    def group_log(self) -> PartitionView | None:
        """Group log; None if the cluster has none yet."""
        return self.partitions[self.meta.partitions] if len(self.logs) > self.meta.partitions else None

    @property
    def nodes(self) -> tuple[ServerView | StorageView, ...]:
        return (*self.servers, *self.storages)

    @property
    def server_reports(self) -> dict[str, ServerDescription]:
        """Descriptions of the servers that answer, by name."""
        return {view.meta.name: view.reported for view in self.servers if view.reported is not None}

    @property
    def storage_reports(self) -> dict[str, StorageDescription]:
        """Descriptions of the storages that answer, by name."""
        return {view.meta.name: view.reported for view in self.storages if view.reported is not None}

    @property
    def node_reports(self) -> list[tuple[str, ServerDescription | StorageDescription]]:
        """Name and description of each daemon that answers; a server and a storage may have the same name."""
        return [*self.server_reports.items(), *self.storage_reports.items()]

    @property
    def owner_reports(self) -> list[OwnedPartition]:
        """Descriptions of the partitions whose owners answer."""
        return [view.reported for view in self.partitions if view.reported is not None]

    @property
    def spoiled(self) -> dict[str, list[int]]:
        """Return missing or unreadable documents as sentences, each with the partitions whose owners continue without
        it."""
        found: dict[str, list[int]] = {error.message: [] for error in self.unreadable.values()}
        for owned in self.owner_reports:
            if owned.trouble:
                found.setdefault(owned.trouble, []).append(owned.partition)
        return found

    @property
    def groups(self) -> GroupTotals | None:
        """Totals of all consumer groups, summed over the owners of partitions; None if no server knows of a group log."""
        reported = [server.groups for server in self.server_reports.values() if server.groups is not None]
        if not reported:
            return None
        return GroupTotals(
            groups=max(one.groups for one in reported),
            **{name: sum(getattr(one, name) for one in reported) for name in _ADDED},
            troubles=tuple(trouble for one in reported for trouble in one.troubles),
            trouble=next((one.trouble for one in reported if one.trouble), ""),
            foreign=max(one.foreign for one in reported),
        )

    @property
    def closed(self) -> list[PartitionView]:
        return [partition for partition in self.partitions if not partition.is_open]

    @property
    def short(self) -> list[PartitionView]:
        """Open partitions in which at least one member does not count towards a commit."""
        return [
            partition
            for partition in self.partitions
            if partition.is_open
            and partition.counting < sum(role is Membership.MEMBER for role in partition.replicas.values())
        ]

    @property
    def silent(self) -> dict[str, WaltzError]:
        """Servers and storages that do not answer: name → error."""
        servers = {view.meta.name: view.error for view in self.servers if view.error is not None}
        return servers | {view.meta.name: view.error for view in self.storages if view.error is not None}

    @property
    def is_healthy(self) -> bool:
        return bool(self.partitions) and not (self.silent or self.closed or self.short or self.missing or self.spoiled)

    def level(self, number: int) -> frozenset[str]:
        """Return the storages that hold everything committed: the owner counts them, and they serve the replica
        themselves. A storage that does not answer may have stopped and is left out."""
        return self.partitions[number].counted & {view.meta.name for view in self.storages if view.serves(number)}

    def storage(self, name: str) -> StorageView:
        return next(view for view in self.storages if view.meta.name == name)


def compared(partitions: Iterable[PartitionView], storages: Iterable[StorageView]) -> tuple[PartitionView, ...]:
    """Return the partitions with `refusing` filled in from the reports of the storages."""
    answering = [view for view in storages if view.reported is not None]
    return tuple(
        replace(
            found,
            refusing=frozenset(
                view.meta.name for view in answering if view.meta.name in found.counted and not view.serves(found.partition)
            ),
        )
        for found in partitions
    )
