"""The gRPC service of a server for operators: descriptions of its partitions and clients, draining, and groups. It
decides nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias
from uuid import UUID

from waltzd.cluster.groups import GroupList, GroupMeta, MadeGroup
from waltzd.daemon import logs
from waltzd.daemon.health_service import add_health, add_reflection
from waltzd.daemon.process import vitals
from waltzd.daemon.readiness import Unready
from waltzd.errors import BadArgument, ForeignCluster
from waltzd.protocol.descriptions import ClientList, Events, ServerDescription
from waltzd.protocol.groups import Change, Changed, ParkedList
from waltzd.protocol.locks import LockExplanation
from waltzd.server.clients.registry import ClientRegistry
from waltzd.server.registration import Registration
from waltzd.server.subscriptions.group_coordinator import GroupCoordinator
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.codec import to_value
from waltzd.wire.grpc import Server
from waltzd.wire.servicer import Host, Origin, add_service

SERVICE = wire.DESCRIPTOR.services_by_name["ServerAdmin"].full_name
Explain: TypeAlias = Callable[[int, int], Awaitable[LockExplanation]]
"""Explains a lock, given the number of a partition that is owned here and the 64 bits of the lock."""


class ServerAdminService(Host):
    def __init__(
        self,
        describe: Callable[[], ServerDescription],
        registration: Registration,
        explain: Explain,
        clients: ClientRegistry,
        groups: GroupCoordinator,
    ) -> None:
        self._groups = groups
        self._clients = clients
        self._describe = describe
        self._registration = registration
        self._explain = explain

    def admit(self, key: UUID | None, origin: Origin) -> None:
        if key is not None and key != (ours := self._describe().cluster_key):
            raise ForeignCluster(f"this server belongs to the cluster {ours}; the caller named cluster {key}", key=ours)

    async def Describe(self, request: wire.DescribeServerRequest, origin: Origin) -> ServerDescription:
        return replace(self._describe(), vitals=vitals())

    async def Events(self, request: wire.EventsRequest, origin: Origin) -> Events:
        return logs.RECENT.after(request.after)

    async def Drain(self, request: wire.DrainRequest, origin: Origin) -> list[int]:
        await self._registration.change(is_draining=request.draining)
        return [found.partition for found in self._describe().partitions]

    async def ExplainLock(self, request: wire.ExplainLockRequest, origin: Origin) -> LockExplanation:
        return await self._explain(request.partition, request.lock)

    async def ListClients(self, request: wire.ListClientsRequest, origin: Origin) -> ClientList:
        return self._clients.describe()

    async def DisconnectClient(self, request: wire.DisconnectRequest, origin: Origin) -> int:
        return self._clients.disconnect(request.name, request.instance if request.HasField("instance") else None)

    # -- consumer groups

    async def ListGroups(self, request: wire.ListGroupsRequest, origin: Origin) -> GroupList:
        found = self._groups.describe(request.name if request.HasField("name") else None)
        return GroupList(tuple(found), self._groups.trouble)

    async def ListParked(self, request: wire.ListParkedRequest, origin: Origin) -> ParkedList:
        partition = request.partition if request.HasField("partition") else None
        found, is_more = self._groups.parked(request.name, partition, request.after, request.count)
        return ParkedList(found, is_more)

    async def SetGroup(self, request: wire.SetGroupRequest, origin: Origin) -> MadeGroup:
        return await self._groups.set(to_value(GroupMeta, request.meta), request.made_at)

    async def RemoveGroup(self, request: wire.RemoveGroupRequest, origin: Origin) -> None:
        await self._groups.remove(request.name, request.made_at)

    async def PassEntry(self, request: wire.PassEntryRequest, origin: Origin) -> None:
        await self._groups.pass_over(request.id)

    async def ChangeGroup(self, request: wire.ChangeGroupRequest, origin: Origin) -> Changed:
        try:
            change = Change(request.change)
        except ValueError:
            raise BadArgument(f"unknown change {request.change} of a group") from None
        ids, epoch = list(request.ids), request.epoch
        return await self._groups.change(request.name, request.made_at, request.partition, change, ids, epoch)


def add_admin_service(
    server: Server,
    describe: Callable[[], ServerDescription],
    registration: Registration,
    explain: Explain,
    clients: ClientRegistry,
    unready: Unready,
    groups: GroupCoordinator,
) -> None:
    add_service(server, "ServerAdmin", ServerAdminService(describe, registration, explain, clients, groups))
    add_health(server, {SERVICE: False}, unready)
    add_reflection(server, [SERVICE])
