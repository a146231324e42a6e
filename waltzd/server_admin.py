"""A server through its port for operators, as tools and other servers see it; and its messages as values and back."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self
from uuid import UUID

import grpc.aio

from waltzd import wire_pb2 as wire
from waltzd.link import error_of, key_of, open_channel
from waltzd.owner import OwnedPartition, OwnedReplica, ServerDescription
from waltzd.role import Role
from waltzd.tls import Tls
from waltzd.wire_pb2_grpc import ServerAdminStub

CALL_SECONDS = 30.0


class ServerAdminClient:
    def __init__(self, address: str, key: UUID, *, seconds: float = CALL_SECONDS, tls: Tls | None = None) -> None:
        """Every call has a deadline of so many seconds. With `tls`, whoever answers must be a server of our cluster."""
        self.address = address
        self._key = key
        self._seconds = seconds
        self._channel = open_channel(address, tls=tls, peer=Role.SERVER)
        self._stub: Any = ServerAdminStub(self._channel)

    async def describe(self) -> ServerDescription:
        """Whatever cluster it belongs to."""
        return description_of(await self._call(self._stub.Describe, wire.DescribeServerRequest()))

    async def drain(self, is_draining: bool) -> list[int]:
        """Give all partitions away and take no new ones, or take part again; the partitions that it owns now."""
        request = wire.DrainRequest(cluster_key=self._key.bytes, draining=is_draining)
        reply: wire.DrainReply = await self._call(self._stub.Drain, request)
        return list(reply.partitions)

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=self._seconds)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def description_message(description: ServerDescription) -> wire.ServerDescription:
    return wire.ServerDescription(
        name=description.name,
        cluster_key=description.cluster_key.bytes,
        instance=description.instance.bytes,
        version=description.version,
        uptime_ms=description.uptime_ms,
        coordinator_connected=description.is_connected,
        draining=description.is_draining,
        is_leader=description.is_leader,
        partitions=[_partition_message(found) for found in description.partitions],
    )


def _partition_message(found: OwnedPartition) -> wire.OwnedPartition:
    replicas = [wire.OwnedReplica(**vars(replica)) for replica in found.replicas]
    return wire.OwnedPartition(**{**vars(found), "replicas": replicas})


def description_of(message: wire.ServerDescription) -> ServerDescription:
    return ServerDescription(
        name=message.name,
        cluster_key=key_of(message.cluster_key),
        instance=key_of(message.instance),
        version=message.version,
        uptime_ms=message.uptime_ms,
        is_connected=message.coordinator_connected,
        is_draining=message.draining,
        is_leader=message.is_leader,
        partitions=tuple(_partition_of(found) for found in message.partitions),
    )


def _partition_of(message: wire.OwnedPartition) -> OwnedPartition:
    replicas = tuple(OwnedReplica(**_fields(found)) for found in message.replicas)
    return OwnedPartition(**{**_fields(message), "replicas": replicas})


def _fields(message: wire.OwnedPartition | wire.OwnedReplica) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
