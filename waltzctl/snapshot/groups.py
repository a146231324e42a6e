"""Consumer groups of a cluster, merged from the reports of all its servers.

Any server knows every group and its positions from the group log. Only the owner of a partition knows its members and
in-flight deliveries, and what is committed. So the owner's report counts for a partition; without an owner's report,
that of the server that is furthest. A group that was removed and created again under the same name is another group:
the newer one counts.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from waltzctl.snapshot.client_inventory import check_heard
from waltzd.cluster.cluster import Cluster, channels_of
from waltzd.cluster.documents import ServerMeta
from waltzd.cluster.groups import GroupDescription, GroupList, GroupMeta, has_group_log
from waltzd.errors import NoSuchGroup, WaltzError
from waltzd.protocol.channels import Channels, named_in, numbers_of
from waltzd.protocol.descriptions import OwnedPartition, ServerDescription
from waltzd.protocol.groups import GroupPartitionStatus
from waltzd.protocol.timelines import Timeline
from waltzd.wire.servers import ServerAdminClient
from waltzd.wire.tls import Tls

CALL_SECONDS = 5.0


class GroupState(enum.StrEnum):
    """State of a group in one partition, the worst first."""

    STOPPED = "stopped"
    """Delivery is stopped until an operator resumes the group."""
    PAUSED = "paused"
    """Delivery is paused for a reason that ends without an operator."""
    UNKNOWN = "unknown"
    """The owner of the partition does not answer."""
    WAITING = "no member"
    """There are transactions to deliver, but the group has no member."""
    WORKING = "at work"
    IDLE = "idle"
    """The group has no member, and all transactions are delivered."""


@dataclass(frozen=True, kw_only=True)
class GroupPartitionView:
    """Consumer group in one partition."""

    place: GroupPartitionStatus
    """Report of the owner; without one, the position in the group log; without that, the start position of the group."""
    owner: str | None
    """Server that reports to own the partition; None if none does."""
    committed: int | None
    """Last committed id, as the owner reports it; None if unknown."""
    timelines: tuple[Timeline, ...] = ()
    """Timelines of the partition's log after the first one, as the owner reports them."""

    @property
    def partition(self) -> int:
        return self.place.partition

    @property
    def lag(self) -> int | None:
        """Transactions not yet done: unfinished deliveries, and everything committed above the group's position.
        Transactions that its filter will skip count until the group has read them. None if unknown."""
        if self.committed is None:
            return None
        return max(0, self.committed - self.place.reach) + self.place.open

    @property
    def standing(self) -> GroupState:
        if self.place.stopped:
            return GroupState.STOPPED
        if self.place.paused:
            return GroupState.PAUSED
        if self.place.members:
            return GroupState.WORKING
        if self.lag is None:
            return GroupState.UNKNOWN
        return GroupState.WAITING if self.lag else GroupState.IDLE

    @property
    def why(self) -> str:
        """Reason why it delivers nothing; empty while it does."""
        return self.place.stopped or self.place.paused


@dataclass(frozen=True, kw_only=True)
class GroupView:
    meta: GroupMeta
    made_at: int
    """Creation stamp, to tell this group from earlier groups of its name."""
    partitions: tuple[GroupPartitionView, ...]

    @property
    def name(self) -> str:
        return self.meta.name

    @property
    def lag(self) -> int | None:
        """Transactions not yet done in all partitions; None if unknown for one of them."""
        lags = [one.lag for one in self.partitions]
        known = [lag for lag in lags if lag is not None]
        return sum(known) if len(known) == len(lags) else None

    @property
    def standing(self) -> GroupState:
        """State of the partition in which it is worst."""
        order = list(GroupState)
        return min((one.standing for one in self.partitions), key=order.index, default=GroupState.UNKNOWN)

    @property
    def members(self) -> list[str]:
        """Names of the members; a member that works in several partitions is listed once."""
        return sorted({member.name for one in self.partitions for member in one.place.members})

    @property
    def in_flight(self) -> int:
        return sum(one.place.in_flight for one in self.partitions)

    @property
    def parked(self) -> int:
        return sum(one.place.parked for one in self.partitions)

    def at(self, partition: int) -> GroupPartitionView | None:
        return next((one for one in self.partitions if one.partition == partition), None)


@dataclass(frozen=True, kw_only=True)
class Groups:
    groups: tuple[GroupView, ...]
    """All groups, sorted by name."""
    silent: Mapping[str, WaltzError]
    """Servers that did not answer, with the error."""
    behind: Mapping[str, str]
    """Servers that may not know the newest state, with the reason."""

    def named(self, name: str) -> GroupView | None:
        return next((one for one in self.groups if one.name == name), None)


NO_GROUPS = Groups(groups=(), silent={}, behind={})


def together(
    reported: Mapping[str, GroupList | WaltzError],
    owned: Mapping[int, tuple[str, OwnedPartition]],
    count: int,
    channels: Channels,
) -> Groups:
    """Merge the lists of all servers. `owned` maps a partition to the server that reports to own it, and its report.
    `count` is the number of partitions of the cluster."""
    lists = {server: found for server, found in reported.items() if isinstance(found, GroupList)}
    newest = [found for found in lists.values() if not found.trouble] or list(lists.values())
    parts: dict[str, list[GroupDescription]] = {}
    for found in newest:
        for group in found.groups:
            parts.setdefault(group.meta.name, []).append(group)
    everywhere = {server: {(one.meta.name, one.made_at): one for one in found.groups} for server, found in lists.items()}
    return Groups(
        groups=tuple(_view(found, everywhere, owned, count, channels) for _, found in sorted(parts.items())),
        silent={server: found for server, found in reported.items() if isinstance(found, WaltzError)},
        behind={server: found.trouble for server, found in lists.items() if found.trouble},
    )


def _view(
    found: Iterable[GroupDescription],
    everywhere: Mapping[str, Mapping[tuple[str, int], GroupDescription]],
    owned: Mapping[int, tuple[str, OwnedPartition]],
    count: int,
    channels: Channels,
) -> GroupView:
    newest = max(found, key=lambda one: one.made_at)
    meta, made_at = newest.meta, newest.made_at
    of_servers = {
        server: {place.partition: place for place in groups[meta.name, made_at].places}
        for server, groups in everywhere.items()
        if (meta.name, made_at) in groups
    }
    begun = {number for places in of_servers.values() for number in places}

    def at(number: int) -> GroupPartitionView:
        owner, reported = owned.get(number, (None, None))
        places = {server: known[number] for server, known in of_servers.items() if number in known}
        start = meta.start(number)
        nowhere = GroupPartitionStatus(number, epoch=0, reach=start, floor=start, open=0, parked=0, stopped="")
        best = max(places.values(), key=lambda one: (one.epoch, one.is_at_work, one.reach, one.floor), default=nowhere)
        if owner is not None and owner in of_servers:
            theirs = places.get(owner, nowhere)
            best = theirs if theirs.epoch >= best.epoch else best
            committed = None if reported is None else reported.committed
        else:
            committed = None
        return GroupPartitionView(
            place=best, owner=owner, committed=committed, timelines=() if reported is None else reported.timelines
        )

    return GroupView(meta=meta, made_at=made_at, partitions=tuple(map(at, sorted(_numbers(meta, begun, count, channels)))))


def _numbers(meta: GroupMeta, begun: set[int], count: int, channels: Channels) -> set[int]:
    """Return the partitions of a group at this moment. If one of its channels is gone, the partitions in which it has
    begun count instead."""
    if meta.partitions is None:
        return set(range(count))
    if any(name not in channels for name in named_in(meta.partitions)):
        known = [part for part in meta.partitions.split(",") if part not in named_in(part) or part in channels]
        numbers = {number for part in known for number in numbers_of(part, channels)} | begun
    else:
        numbers = set(numbers_of(meta.partitions, channels))
    return {number for number in numbers if number < count}


def owned_by(servers: Mapping[str, ServerDescription]) -> dict[int, tuple[str, OwnedPartition]]:
    """Map each partition to the server that reports to own it, and its report; the highest generation wins."""
    found = [(server, one) for server, reported in servers.items() for one in reported.partitions]
    found.sort(key=lambda report_of: report_of[1].generation)
    return {one.partition: (server, one) for server, one in found}


# -- asking ------------------------------------------------------------------------------------------------------------


async def groups(cluster: Cluster, tls: Tls | None, name: str | None = None) -> Groups:
    """Ask all registered servers for one group or for all; raise if none answered. Without a group log no server is
    asked."""
    meta, (assignment, _), (channels, _) = await asyncio.gather(
        cluster.meta(), cluster.assignment(), channels_of(cluster.coordinator)
    )
    if not has_group_log(assignment, meta):
        return NO_GROUPS
    servers = await cluster.servers()

    async def ask(server: ServerMeta) -> tuple[ServerDescription | None, GroupList | WaltzError]:
        asked = ServerAdminClient(server.admin_listen, meta.key, seconds=CALL_SECONDS, tls=tls, name=server.name)
        async with asked as admin:
            try:
                reported = await admin.describe()
                try:
                    return reported, await admin.groups(name)
                except NoSuchGroup:
                    return reported, GroupList(())
            except WaltzError as error:
                return None, error

    answers = dict(zip(servers, await asyncio.gather(*map(ask, servers.values())), strict=True))
    lists = {server: found for server, (_, found) in answers.items()}
    check_heard(lists, "which consumer groups there are")
    return together(
        lists,
        owned_by({server: reported for server, (reported, _) in answers.items() if reported is not None}),
        meta.partitions,
        channels,
    )
