"""The gRPC service of a server for operators: what it owns and how that is, and draining. No decision is made here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import grpc.aio

from waltzd import wire_pb2 as wire
from waltzd.errors import ForeignCluster, WaltzError
from waltzd.link import Server, abort, key_of
from waltzd.owner import ServerDescription
from waltzd.server.registration import Registration
from waltzd.server_admin import description_message
from waltzd.wire_pb2_grpc import ServerAdminServicer, add_ServerAdminServicer_to_server

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class ServerAdminService(ServerAdminServicer):
    def __init__(self, describe: Callable[[], ServerDescription], registration: Registration) -> None:
        self._describe = describe
        self._registration = registration

    async def Describe(self, request: wire.DescribeServerRequest, context: Context) -> wire.ServerDescription:
        return description_message(self._describe())

    async def Drain(self, request: wire.DrainRequest, context: Context) -> wire.DrainReply:
        try:
            key, ours = key_of(request.cluster_key), self._describe().cluster_key
            if key != ours:
                raise ForeignCluster(f"this server belongs to the cluster {ours}; the caller says {key}", key=ours)
            await self._registration.change(is_draining=request.draining)
        except WaltzError as error:
            await abort(context, error)
        return wire.DrainReply(partitions=[found.partition for found in self._describe().partitions])


def add_admin_service(server: Server, describe: Callable[[], ServerDescription], registration: Registration) -> None:
    add_ServerAdminServicer_to_server(ServerAdminService(describe, registration), server)
