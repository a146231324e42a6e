"""A server through its port for operators, as tools and other servers see it; and its messages as values and back."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from waltzd import wire_pb2 as wire
from waltzd.caller import Caller
from waltzd.errors import BadFrame
from waltzd.lock_explanation import LockExplanation
from waltzd.messages import events_of, histogram_message, histogram_of, vitals_message, vitals_of
from waltzd.outcome import Reason
from waltzd.owner import OwnedPartition, OwnedReplica, PartitionStatistics, ServerDescription
from waltzd.process import Events
from waltzd.role import Role
from waltzd.rpc import key_of
from waltzd.tls import Tls
from waltzd.wire_pb2_grpc import ServerAdminStub

CALL_SECONDS = 30.0


class ServerAdminClient(Caller):
    service = ServerAdminStub
    peer = Role.SERVER

    def __init__(
        self, address: str, key: UUID, *, seconds: float = CALL_SECONDS, tls: Tls | None = None, name: str | None = None
    ) -> None:
        super().__init__(address, seconds=seconds, tls=tls, name=name)
        self._key = key

    async def describe(self) -> ServerDescription:
        """Whatever cluster it belongs to."""
        return description_of(await self._call(self._stub.Describe, wire.DescribeServerRequest()))

    async def drain(self, is_draining: bool) -> list[int]:
        """Give all partitions away and take no new ones, or take part again; the partitions that it owns now."""
        request = wire.DrainRequest(cluster_key=self._key.bytes, draining=is_draining)
        reply: wire.DrainReply = await self._call(self._stub.Drain, request)
        return list(reply.partitions)

    async def events(self, after: int = 0) -> Events:
        """What it logged last, with higher numbers than this."""
        return events_of(await self._call(self._stub.Events, wire.EventsRequest(after=after)))

    async def explain_lock(self, partition: int, lock: int) -> LockExplanation:
        """What its table says of a lock, by its 64 bits; only the owner of the partition knows."""
        request = wire.ExplainLockRequest(cluster_key=self._key.bytes, partition=partition, lock=lock)
        return explanation_of(await self._call(self._stub.ExplainLock, request))


def explanation_message(found: LockExplanation) -> wire.LockExplanation:
    return wire.LockExplanation(**{**vars(found), "reason": int(found.reason)})


def explanation_of(message: wire.LockExplanation) -> LockExplanation:
    try:
        reason = Reason(message.reason)
    except ValueError:
        raise BadFrame(f"a lock is explained with the reason {message.reason}, which this version does not know") from None
    return LockExplanation(**{**_fields(message), "reason": reason})


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
        vitals=None if description.vitals is None else vitals_message(description.vitals),
    )


def _partition_message(found: OwnedPartition) -> wire.OwnedPartition:
    replicas = [wire.OwnedReplica(**vars(replica)) for replica in found.replicas]
    return wire.OwnedPartition(**{**vars(found), "replicas": replicas, "statistics": _statistics_message(found.statistics)})


def _statistics_message(found: PartitionStatistics) -> wire.PartitionStatistics:
    return wire.PartitionStatistics(**{**vars(found), "commit": histogram_message(found.commit)})


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
        vitals=vitals_of(message.vitals) if message.HasField("vitals") else None,
    )


def _partition_of(message: wire.OwnedPartition) -> OwnedPartition:
    replicas = tuple(OwnedReplica(**_fields(found)) for found in message.replicas)
    return OwnedPartition(**{**_fields(message), "replicas": replicas, "statistics": _statistics_of(message.statistics)})


def _statistics_of(message: wire.PartitionStatistics) -> PartitionStatistics:
    commit = histogram_of(message.commit)
    return PartitionStatistics(**{**_fields(message), "refused": dict(message.refused), "commit": commit})


def _fields(
    message: wire.OwnedPartition | wire.OwnedReplica | wire.PartitionStatistics | wire.LockExplanation,
) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
