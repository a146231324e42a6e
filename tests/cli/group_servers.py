"""Two servers that know consumer groups and nothing else, for the tool: what they say is what a test puts here.

The coordinator is one in memory. Each is asked over gRPC, as real ones are; so what is missing is only what servers decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

import grpc
import pytest

from tests.answers import Answers, add_threaded
from waltzctl.health import poll
from waltzd.client import loop
from waltzd.cluster import zookeeper
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import Assignment, ClusterMeta, Ownership, ServerMeta
from waltzd.cluster.groups import GroupDescription, GroupList, GroupMeta, MadeGroup
from waltzd.cluster.memory import MemoryCoordinator, MemoryTree
from waltzd.errors import BadArgument, CannotConnect, NoSuchGroup, WaltzError
from waltzd.errors.operations import NotOwner
from waltzd.protocol.batches import PartitionLocation, Topology
from waltzd.protocol.descriptions import OwnedPartition, PartitionStatistics, ServerDescription
from waltzd.protocol.groups import Change, Changed, GroupMember, GroupPartitionStatus, Mode, ParkedList, ParkedTransaction
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import FIRST
from waltzd.wire.codec import to_value
from waltzd.wire.servicer import Origin

KEY = UUID(int=7)
PARTITIONS = 4
COMMITTED = 99
BEGAN = 1_700_000_000
"""The second of the first transaction, since 1970."""
SERVERS = ("a", "b")
"""The partitions are theirs in turns."""


def meta(name: str = "mailer", **changes: Any) -> GroupMeta:
    return GroupMeta(**{"name": name, "partitions": None, "mode": Mode.QUEUE, **changes})


def place(partition: int, floor: int = COMMITTED, **changes: Any) -> GroupPartitionStatus:
    fields = {"epoch": 1, "reach": floor, "floor": floor, "open": 0, "parked": 0, "stopped": ""}
    return GroupPartitionStatus(partition=partition, **{**fields, **changes})


def member(name: str = "one", **changes: Any) -> GroupMember:
    fields = {"who": "anonymous", "peer": "10.0.0.1:5", "in_flight": 2, "room": 100, "delivered": 7, "acknowledged": 5,
              "failed": 1, "age_ms": 61_000}  # fmt: skip
    return GroupMember(name=name, **{**fields, **changes})


def owned(partition: int, committed: int = COMMITTED) -> OwnedPartition:
    return OwnedPartition(
        partition=partition, generation=1, session=1, step="OPEN", waiting="", committed=committed, last_id=committed,
        low_mark=-1, mounts=0, tail_bytes=0, replicas=(), statistics=PartitionStatistics(),
    )  # fmt: skip


@dataclass
class Servers:
    """What all of them know. Places that are at work are told by the owner of the partition only."""

    groups: dict[str, GroupDescription] = field(default_factory=dict)
    parked: dict[str, list[ParkedTransaction]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    behind: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    """Changes: which server, what, and the request."""
    refusals: list[WaltzError] = field(default_factory=list)
    """What the next changes are answered, one after the other."""
    epochs: list[int] = field(default_factory=list)
    """Epochs that changes named, also those that were refused."""
    failing: set[int] = field(default_factory=set)
    """Partitions in which no group can be changed."""
    tree: MemoryTree = field(default_factory=MemoryTree)
    addresses: Mapping[str, str] = field(default_factory=dict)

    def put(self, made_at: int = 3, *places: GroupPartitionStatus, **changes: Any) -> None:
        found = meta(**changes)
        self.groups[found.name] = GroupDescription(meta=found, made_at=made_at, places=places)

    def owner(self, partition: int) -> str:
        return SERVERS[partition % len(SERVERS)]

    def known_to(self, server: str, name: str | None) -> GroupList:
        def seen(one: GroupPartitionStatus) -> GroupPartitionStatus:
            if self.owner(one.partition) == server:
                return one
            return GroupPartitionStatus(one.partition, one.epoch, one.reach, one.floor, one.open, one.parked, one.stopped)

        found = [one for one in self.groups.values() if name in (None, one.meta.name)]
        return GroupList(
            groups=tuple(replace(one, places=tuple(map(seen, one.places))) for one in found),
            trouble=self.behind.get(server, ""),
        )

    def description(self, server: str) -> ServerDescription:
        return ServerDescription(
            name=server, cluster_key=KEY, instance=UUID(int=2), version="1", uptime_ms=1, is_connected=True,
            is_draining=False, is_leader=server == "a",
            partitions=tuple(owned(number) for number in range(PARTITIONS) if self.owner(number) == server),
        )  # fmt: skip


class Admin(Answers):
    def __init__(self, name: str, servers: Servers) -> None:
        self.name, self.servers = name, servers

    def admit(self, key: UUID | None, origin: Origin) -> None:
        if self.name in self.servers.silent:
            raise CannotConnect("it is told to be silent")

    async def Describe(self, request: Any, origin: Origin) -> Any:
        return self.servers.description(self.name)

    async def ListGroups(self, request: Any, origin: Origin) -> Any:
        name = request.name if request.HasField("name") else None
        if name is not None and name not in self.servers.groups:
            raise NoSuchGroup(f"there is no group {name}")
        return self.servers.known_to(self.name, name)

    async def ListParked(self, request: Any, origin: Origin) -> Any:
        wanted = request.partition if request.HasField("partition") else None
        found = [
            one
            for one in self.servers.parked.get(request.name, [])
            if wanted in (None, one.partition) and (wanted is None or one.id > request.after)
        ]
        return ParkedList(tuple(found[: request.count]), len(found) > request.count)

    async def SetGroup(self, request: Any, origin: Origin) -> Any:
        self._refuse()
        meta = to_value(GroupMeta, request.meta)
        self.servers.asked.append((self.name, "set", meta))
        old = self.servers.groups[meta.name]
        assert old.made_at == request.made_at
        self.servers.groups[meta.name] = replace(old, meta=meta)
        return MadeGroup(meta, old.made_at)

    async def RemoveGroup(self, request: Any, origin: Origin) -> Any:
        self._refuse()
        self.servers.asked.append((self.name, "remove", request.name))
        assert self.servers.groups.pop(request.name).made_at == request.made_at

    async def PassEntry(self, request: Any, origin: Origin) -> Any:
        self._refuse()
        self.servers.asked.append((self.name, "pass over", request.id))

    async def ChangeGroup(self, request: Any, origin: Origin) -> Any:
        self.servers.epochs.append(request.epoch)
        self._refuse()
        if request.partition in self.servers.failing:
            raise BadArgument("not this one")
        if self.servers.owner(request.partition) != self.name:
            raise NotOwner("another server owns it")
        assert self.servers.groups[request.name].made_at == request.made_at
        told = Change(request.change), request.partition, tuple(request.ids)
        self.servers.asked.append((self.name, "change", told))
        return Changed(count=len(request.ids), epoch=2, floor=5)

    def _refuse(self) -> None:
        if self.servers.refusals:
            raise self.servers.refusals.pop(0)


class Log(Answers):
    """Of a cluster whose partitions all have the same transactions, one a second."""

    def __init__(self, name: str, servers: Servers) -> None:
        self.name, self.servers = name, servers

    async def Locate(self, request: Any, origin: Origin) -> Any:
        found = self.servers
        places = tuple(
            PartitionLocation(generation=1, server=found.owner(number), address=found.addresses[found.owner(number)])
            for number in range(PARTITIONS)
        )
        return Topology(cluster="trial", cluster_key=KEY, places=places, servers=())

    async def HighWaterMark(self, request: Any, origin: Origin) -> Any:
        return Position(COMMITTED, FIRST), True

    async def FindTime(self, request: Any, origin: Origin) -> Any:
        return Position(min(COMMITTED, request.time // 1_000_000 - BEGAN - 1), FIRST)

    async def MakeGroup(self, request: Any, origin: Origin) -> Any:
        if self.servers.refusals:
            raise self.servers.refusals.pop(0)
        meta = to_value(GroupMeta, request.meta)
        self.servers.asked.append((self.name, "make", meta))
        self.servers.groups[meta.name] = GroupDescription(meta, 7, ())
        return MadeGroup(meta, 7, is_new=True)


@contextmanager
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """`--coordinator zk:1` is how the tool reaches them."""
    servers, daemons, addresses = Servers(), [], {}
    for name in SERVERS:
        daemon = grpc.server(ThreadPoolExecutor(2))
        add_threaded(daemon, "ServerAdmin", Admin(name, servers))
        add_threaded(daemon, "Log", Log(name, servers))
        addresses[name] = f"127.0.0.1:{daemon.add_insecure_port('127.0.0.1:0')}"
        daemon.start()
        daemons.append(daemon)
    servers.addresses = addresses
    loop.run(_write_down(servers))

    async def start() -> None:
        pass

    def connect(*_: Any, **__: Any) -> MemoryCoordinator:
        found = servers.tree.connect()
        found.start = start  # type: ignore[attr-defined]
        return found

    for module in (zookeeper, poll):
        monkeypatch.setattr(module, "ZooKeeperCoordinator", connect)
    try:
        yield servers
    finally:
        for daemon in daemons:
            daemon.stop(None)


async def _write_down(servers: Servers) -> None:
    """The cluster, its servers and their partitions, and one owner more: that of the group log."""
    coordinator = servers.tree.connect()
    cluster = await Cluster.create(
        coordinator, ClusterMeta(name="trial", key=KEY, partitions=PARTITIONS, created="2026-11-24")
    )
    for name, address in servers.addresses.items():
        await cluster.register_server(
            ServerMeta(name=name, listen=address, admin_listen=address, instance=UUID(int=2), version="1")
        )
    _, version = await cluster.assignment()
    owners = tuple(Ownership(servers.owner(number), 1) for number in range(PARTITIONS + 1))
    await cluster.save_assignment(Assignment(owners=owners), version)
