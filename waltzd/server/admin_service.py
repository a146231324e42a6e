"""The gRPC service of a server for operators: what it owns and how that is, and draining. It decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import grpc.aio

from waltzd.cluster.groups import GroupMeta
from waltzd.daemon import logs
from waltzd.daemon.health_service import add_health, add_reflection
from waltzd.daemon.process import vitals
from waltzd.daemon.readiness import Unready
from waltzd.errors import BadArgument, ForeignCluster, WaltzError
from waltzd.protocol.descriptions import ServerDescription
from waltzd.protocol.groups import Change
from waltzd.protocol.locks import LockExplanation
from waltzd.server.clients.registry import Registry
from waltzd.server.registration import Registration
from waltzd.server.subscriptions.board import Board
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.codec import key_of, to_message, to_value
from waltzd.wire.grpc import Server, abort
from waltzd.wire.wire_pb2_grpc import ServerAdminServicer, add_ServerAdminServicer_to_server

SERVICE = wire.DESCRIPTOR.services_by_name["ServerAdmin"].full_name
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Explain: TypeAlias = Callable[[int, int], LockExplanation]
"""Of a partition that is owned here, and the 64 bits of a lock."""


class ServerAdminService(ServerAdminServicer):
    def __init__(
        self,
        describe: Callable[[], ServerDescription],
        registration: Registration,
        explain: Explain,
        clients: Registry,
        groups: Board,
    ) -> None:
        self._groups = groups
        self._clients = clients
        self._describe = describe
        self._registration = registration
        self._explain = explain

    async def Describe(self, request: wire.DescribeServerRequest, context: Context) -> wire.ServerDescription:
        return to_message(wire.ServerDescription, replace(self._describe(), vitals=vitals()))

    async def Events(self, request: wire.EventsRequest, context: Context) -> wire.EventsReply:
        return to_message(wire.EventsReply, logs.RECENT.after(request.after))

    async def Drain(self, request: wire.DrainRequest, context: Context) -> wire.DrainReply:
        try:
            self._check_key(request.cluster_key)
            await self._registration.change(is_draining=request.draining)
        except WaltzError as error:
            await abort(context, error)
        return wire.DrainReply(partitions=[found.partition for found in self._describe().partitions])

    async def ExplainLock(self, request: wire.ExplainLockRequest, context: Context) -> wire.LockExplanation:
        try:
            self._check_key(request.cluster_key)
            return to_message(wire.LockExplanation, self._explain(request.partition, request.lock))
        except WaltzError as error:
            await abort(context, error)

    async def ListClients(self, request: wire.ListClientsRequest, context: Context) -> wire.ClientList:
        return to_message(wire.ClientList, self._clients.describe())

    async def DisconnectClient(self, request: wire.DisconnectRequest, context: Context) -> wire.DisconnectReply:
        try:
            self._check_key(request.cluster_key)
        except WaltzError as error:
            await abort(context, error)
        instance = request.instance if request.HasField("instance") else None
        return wire.DisconnectReply(mounts=self._clients.disconnect(request.name, instance))

    # -- durable groups

    async def ListGroups(self, request: wire.ListGroupsRequest, context: Context) -> wire.GroupList:
        try:
            found = self._groups.describe(request.name if request.HasField("name") else None)
            groups = [to_message(wire.GroupDescription, one) for one in found]
            return wire.GroupList(groups=groups, trouble=self._groups.trouble)
        except WaltzError as error:
            await abort(context, error)

    async def ListParked(self, request: wire.ListParkedRequest, context: Context) -> wire.ParkedList:
        try:
            partition = request.partition if request.HasField("partition") else None
            found, is_more = self._groups.parked(request.name, partition, request.after, request.count)
            return wire.ParkedList(parked=[to_message(wire.ParkedTransaction, one) for one in found], more=is_more)
        except WaltzError as error:
            await abort(context, error)

    async def SetGroup(self, request: wire.SetGroupRequest, context: Context) -> wire.MadeGroup:
        try:
            self._check_key(request.cluster_key)
            found = await self._groups.set(to_value(GroupMeta, request.meta), request.made_at)
            return to_message(wire.MadeGroup, found)
        except WaltzError as error:
            await abort(context, error)

    async def RemoveGroup(self, request: wire.RemoveGroupRequest, context: Context) -> wire.RemoveGroupReply:
        try:
            self._check_key(request.cluster_key)
            await self._groups.remove(request.name, request.made_at)
            return wire.RemoveGroupReply()
        except WaltzError as error:
            await abort(context, error)

    async def PassEntry(self, request: wire.PassEntryRequest, context: Context) -> wire.PassEntryReply:
        try:
            self._check_key(request.cluster_key)
            await self._groups.pass_over(request.id)
            return wire.PassEntryReply()
        except WaltzError as error:
            await abort(context, error)

    async def ChangeGroup(self, request: wire.ChangeGroupRequest, context: Context) -> wire.GroupChanged:
        try:
            self._check_key(request.cluster_key)
            try:
                change = Change(request.change)
            except ValueError:
                raise BadArgument(f"this version knows no change {request.change} of a group") from None
            found = await self._groups.change(request.name, request.made_at, request.partition, change, list(request.ids))
            return to_message(wire.GroupChanged, found)
        except WaltzError as error:
            await abort(context, error)

    def _check_key(self, raw: bytes) -> None:
        key, ours = key_of(raw), self._describe().cluster_key
        if key != ours:
            raise ForeignCluster(f"this server belongs to the cluster {ours}; the caller says {key}", key=ours)


def add_admin_service(
    server: Server,
    describe: Callable[[], ServerDescription],
    registration: Registration,
    explain: Explain,
    clients: Registry,
    unready: Unready,
    groups: Board,
) -> None:
    add_ServerAdminServicer_to_server(ServerAdminService(describe, registration, explain, clients, groups), server)
    add_health(server, {SERVICE: False}, unready)
    add_reflection(server, [SERVICE])
