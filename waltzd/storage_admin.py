"""A storage through its port for operators, as tools and other daemons see it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from uuid import UUID

from waltzd import wire_pb2 as wire
from waltzd.caller import Caller
from waltzd.digest import HASH_BYTES, Digest
from waltzd.errors import BadFrame, WaltzError
from waltzd.finding import Finding
from waltzd.messages import description_of, error_of_detail, events_of, finding_of, status_of
from waltzd.process import Events
from waltzd.replica import ReplicaStatus, SetAside, StorageDescription, VerifySummary
from waltzd.role import Role
from waltzd.tls import Tls
from waltzd.wire_pb2_grpc import StorageAdminStub

CALL_SECONDS = 30.0
FENCE_SECONDS = 300.0
"""A storage proves what it holds before it answers, and its tail may be long."""


class AdminClient(Caller):
    """One storage, through its port for operators."""

    service = StorageAdminStub
    peer = Role.STORAGE

    def __init__(
        self, address: str, key: UUID, *, seconds: float = CALL_SECONDS, tls: Tls | None = None, name: str | None = None
    ) -> None:
        super().__init__(address, seconds=seconds, tls=tls, name=name)
        self._key = key

    async def describe(self) -> StorageDescription:
        return description_of(await self._call(self._stub.Describe, wire.DescribeRequest()))

    async def events(self, after: int = 0) -> Events:
        """What it logged last, with higher numbers than this."""
        return events_of(await self._call(self._stub.Events, wire.EventsRequest(after=after)))

    async def create_partitions(self, partitions: Sequence[int]) -> dict[int, WaltzError | None]:
        request = wire.PartitionsRequest(cluster_key=self._key.bytes, partitions=partitions)
        return self._results(await self._call(self._stub.CreatePartitions, request))

    async def remove_partitions(
        self, partitions: Sequence[int], *, delete_files: bool = False
    ) -> dict[int, WaltzError | None]:
        request = wire.RemoveRequest(cluster_key=self._key.bytes, partitions=partitions, delete_files=delete_files)
        return self._results(await self._call(self._stub.RemovePartitions, request))

    async def set_available(self, partitions: Sequence[int], available: bool) -> dict[int, WaltzError | None]:
        request = wire.AvailabilityRequest(cluster_key=self._key.bytes, partitions=partitions, available=available)
        return self._results(await self._call(self._stub.SetAvailable, request))

    async def fence(self, partition: int, session: int) -> ReplicaStatus:
        """Let its replica promise itself to this session, whatever it has promised before; where it then stands, proven."""
        request = wire.FenceRequest(cluster_key=self._key.bytes, partition=partition, session=session)
        return status_of(await self._call(self._stub.Fence, request, FENCE_SECONDS))

    async def delete_aside(self, names: Sequence[str]) -> tuple[SetAside, ...]:
        """Directories that were set aside, for good; what was deleted."""
        reply = await self._call(self._stub.DeleteSetAside, wire.SetAsideRequest(cluster_key=self._key.bytes, names=names))
        return tuple(SetAside(one.name, one.bytes) for one in reply.deleted)

    @staticmethod
    def _results(reply: wire.PartitionsReply) -> dict[int, WaltzError | None]:
        return {
            result.partition: error_of_detail(result.error) if result.HasField("error") else None
            for result in reply.results
        }

    async def digest(self, partition: int, first_id: int, last_id: int) -> Digest:
        """A hash of what its replica holds there and knows to be committed. It may end earlier than asked."""
        request = wire.DigestRequest(cluster_key=self._key.bytes, partition=partition, first_id=first_id, last_id=last_id)
        reply: wire.DigestReply = await self._call(self._stub.Digest, request)
        found = Digest(first_id=first_id, last_id=reply.last_id, hash=reply.hash, bytes=reply.bytes)
        if not first_id <= found.last_id <= last_id or len(found.hash) != HASH_BYTES or found.records != reply.records:
            raise BadFrame(f"{self.address} answered with a digest that is none of ids {first_id} to {last_id}")
        return found

    async def verify(self, partitions: Sequence[int] = ()) -> AsyncIterator[Finding | VerifySummary]:
        """The findings of each partition, then its summary."""
        request = wire.VerifyRequest(cluster_key=self._key.bytes, partitions=partitions)
        async with aclosing(self._stream(self._stub.Verify, request)) as messages:
            async for message in messages:
                if message.HasField("finding"):
                    yield finding_of(message.finding)
                    continue
                summary = message.summary
                yield VerifySummary(
                    partition=summary.partition,
                    segments=summary.segments,
                    records=summary.records,
                    bytes=summary.bytes,
                    findings=summary.findings,
                )
