"""A cluster as a whole, as one value: what the coordinator has written down, and what its processes say of themselves.

It is put together from many answers that are a moment apart (`look`), so it may not agree with itself while things move. A
process that does not answer is part of the snapshot, with the reason.
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
"""What each server says of the partitions that it owns."""


def silence(error: WaltzError) -> str:
    """Return what became of a question, as a sentence goes on with it: no answer, or one that says no."""
    return "does not answer" if isinstance(error, CannotConnect) else "refuses to answer"


def silent_servers(found: Mapping[str, WaltzError]) -> list[str]:
    """Return a sentence for each server that was asked and did not answer."""
    return [
        f"server {name} {silence(error)}, and may know more: {error.code} {error.message}" for name, error in found.items()
    ]


def timeline_sentence(one: Timeline) -> str:
    """Describe who ended the log of the timeline before, when, and where."""
    how = f" by {one.cause}" if one.cause else ""
    when = f" at {one.began}" if one.began else ""
    by = f" ({one.who})" if one.who else ""
    return (
        f"timeline {one.number}: begun{how}{when}{by} in session {one.session:,}; it shares timeline {one.parent} up to id "
        f"{one.fork:,}, and what that had above was given up"
    )


@dataclass(frozen=True, kw_only=True)
class Call:
    """When a process was asked, and how long its answer took, with the time to connect where no connection was open."""

    middle_ms: float = 0.0
    """Half way between question and answer, by the clock of this machine, since 1970."""
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
        """What it says of its replica of a partition; None when it has none, or does not answer."""
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
    """What its owner says of it."""
    is_group_log: bool = False
    """It holds where consumer groups stand, and nothing of applications."""
    refusing: frozenset[str] = frozenset()
    """Storages that answer, and say that they do not serve this replica: it was taken offline, is refused, or is not there.
    While nothing is written an owner does not notice it; a snapshot asks both sides and knows more."""

    @property
    def is_open(self) -> bool:
        """It takes transactions: its owner says so, and no majority of the storages says otherwise."""
        return self.owner_says_open and not self._lacks_majority

    @property
    def owner_says_open(self) -> bool:
        return self.reported is not None and self.reported.step == OPEN and not self.reported.waiting

    @property
    def counted(self) -> frozenset[str]:
        """Storages whose acknowledgements make transactions committed."""
        replicas = self.reported.replicas if self.reported is not None else ()
        return frozenset(replica.storage for replica in replicas if replica.counts) - self.refusing

    @property
    def counting(self) -> int:
        return len(self.counted)

    @property
    def format(self) -> int | None:
        """Of the segments that its session writes; None while that is not open."""
        return self.reported.format if self.reported is not None and self.reported.step == OPEN else None

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """Timelines of its log behind the first one, as its owner reports them."""
        return () if self.reported is None else self.reported.timelines

    @property
    def state(self) -> str:
        """How it is, in one word."""
        if self.reported is None:
            return "unknown"
        return "open" if self.is_open else "waiting" if self.reported.step == OPEN else self.reported.step.lower()

    @property
    def waiting(self) -> str:
        """Why it is not open, in one sentence."""
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
        """Why it is not open, as far as its owner knows."""
        if self.owner is None:
            return "no server owns it"
        if self.reported is None:
            return f"its owner {self.owner} does not say how it is"
        return "" if self.owner_says_open else self.reported.waiting or f"{self.owner} is recovering it"

    @property
    def _members(self) -> frozenset[str]:
        return frozenset(name for name, role in self.replicas.items() if role is Membership.MEMBER)

    @property
    def _lacks_majority(self) -> bool:
        """Whether the replicas that storages refuse leave no majority."""
        return bool(self.refusing) and len(self.counted & self._members) < majority(len(self._members))


@dataclass(frozen=True, kw_only=True)
class ClusterSnapshot:
    meta: ClusterMeta
    leader: str | None
    servers: tuple[ServerView, ...]
    storages: tuple[StorageView, ...]
    partitions: tuple[PartitionView, ...]
    moves: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Replicas that are on their way: where those of a partition shall be in the end."""
    missing: tuple[ServerMeta, ...] = ()
    """Servers that are expected and not registered, as they announced themselves last."""
    unreadable: Mapping[str, WaltzError] = field(default_factory=dict)
    """Documents of the coordinator that cannot be understood, by their paths."""

    @property
    def logs(self) -> range:
        """The numbers of all partitions, and of the group log where there is one: what must not be lost."""
        return range(max(self.meta.partitions, min(len(self.partitions), self.meta.partitions + 1)))

    @property
    def group_log(self) -> PartitionView | None:
        """None where the cluster has none yet."""
        return self.partitions[self.meta.partitions] if len(self.logs) > self.meta.partitions else None

    @property
    def nodes(self) -> tuple[ServerView | StorageView, ...]:
        return (*self.servers, *self.storages)

    @property
    def spoiled(self) -> dict[str, list[int]]:
        """Documents that are gone or spoiled, as a sentence, and the partitions whose owners go on with what they said."""
        found: dict[str, list[int]] = {error.message: [] for error in self.unreadable.values()}
        for view in self.partitions:
            if view.reported is not None and view.reported.trouble:
                found.setdefault(view.reported.trouble, []).append(view.partition)
        return found

    @property
    def groups(self) -> GroupTotals | None:
        """All consumer groups, as the owners of partitions say; None where no server knows of a group log."""
        reported = [
            view.reported.groups for view in self.servers if view.reported is not None and view.reported.groups is not None
        ]
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
        """Open partitions in which a member does not count."""
        return [
            partition
            for partition in self.partitions
            if partition.is_open
            and partition.counting < sum(role is Membership.MEMBER for role in partition.replicas.values())
        ]

    @property
    def silent(self) -> dict[str, WaltzError]:
        """Servers and storages that do not answer, by name, and why."""
        servers = {view.meta.name: view.error for view in self.servers if view.error is not None}
        return servers | {view.meta.name: view.error for view in self.storages if view.error is not None}

    @property
    def is_healthy(self) -> bool:
        return bool(self.partitions) and not (self.silent or self.closed or self.short or self.missing or self.spoiled)

    def level(self, number: int) -> frozenset[str]:
        """Storages that hold everything that is committed: the owner says so, and the storage itself says that it serves. A
        silent storage may have stopped, and does not count."""
        return self.partitions[number].counted & {view.meta.name for view in self.storages if view.serves(number)}

    def storage(self, name: str) -> StorageView:
        return next(view for view in self.storages if view.meta.name == name)


def compared(partitions: Iterable[PartitionView], storages: Iterable[StorageView]) -> tuple[PartitionView, ...]:
    """The partitions, completed by what the storages say of the replicas that owners count."""
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
