"""The two gRPC services of a storage: requests to calls. No decision is made here."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from time import time_ns
from uuid import UUID

from waltzd.archive.listing import METADATA_BYTES_MAX
from waltzd.daemon import logs
from waltzd.daemon.process import vitals
from waltzd.errors import NotPermitted, TooLarge, WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.format.finding import Finding
from waltzd.format.key_index import LockMarks, LockQuery
from waltzd.format.record import Digest
from waltzd.protocol.descriptions import (
    ArchiveCheck,
    Archived,
    BackedUp,
    Events,
    ReplicaStatus,
    RestoreOrder,
    Restoring,
    SetAside,
    StorageDescription,
    VerifySummary,
)
from waltzd.protocol.peers import SECRET_BYTES, Contact, Content, LockHistory
from waltzd.protocol.role import Role
from waltzd.storage.calls import StorageCalls
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.codec import lineage_of_messages, to_value, uuid_of
from waltzd.wire.servicer import Host, Origin


def _session(target: wire.Target) -> int:
    if not target.HasField("session"):
        raise BadFrame("this call needs a session")
    return target.session


def _contact(target: wire.Target) -> Contact:
    return Contact(target.contact, target.secret)


def _optional_session(target: wire.Target, origin: Origin) -> int | None:
    """Return the session of a read. With a session a reader sees uncommitted records, so only a server may name one."""
    if not target.HasField("session"):
        return None
    caller = origin.identity
    if caller is not None and caller.role is not Role.SERVER:
        raise NotPermitted(f"{caller.name} has the role {caller.role}; only a server reads with a session")
    return target.session


class _Service(Host):
    def __init__(self, calls: StorageCalls) -> None:
        self._calls = calls

    def admit(self, key: UUID | None, origin: Origin) -> None:
        """Raise unless the call is meant for this cluster, this storage and this process."""
        if key is not None:
            self._calls.check_key(key)
        self._calls.directory.check_meant(origin.storage, origin.instance)

    async def _learn_name(self, origin: Origin) -> None:
        """Take the name that the first caller gives to this storage; its directory keeps the name."""
        if origin.storage and not self._calls.directory.name:
            await self._calls.take_name(origin.storage)


class ReplicaService(_Service):
    def __init__(
        self, calls: StorageCalls, stream_port: int = 0, *, clock: Callable[[], int] = lambda: time_ns() // 1000
    ) -> None:
        """`clock`: microseconds since 1970, for the answer to `Open`."""
        super().__init__(calls)
        self._stream_port = stream_port
        self._clock = clock

    def refused(self) -> None:
        self._calls.answered.refused_calls += 1

    async def Open(self, request: wire.OpenRequest, origin: Origin) -> tuple[ReplicaStatus, int]:
        target = request.target
        if target.HasField("session"):
            await self._learn_name(origin)
            if len(target.secret) != SECRET_BYTES:
                raise BadFrame(f"a session is opened with a secret of {SECRET_BYTES} bytes, not of {len(target.secret)}")
            status = await self._calls.open_session(
                target.partition,
                target.session,
                request.partitions,
                create=request.create,
                caller=request.caller,
                secret=target.secret,
            )
        else:
            status = self._calls.status(target.partition)
        return replace(status, time=self._clock()), self._stream_port

    async def Quiet(self, request: wire.QuietRequest, origin: Origin) -> Sequence[int]:
        return self._calls.quiet(request.partitions)

    async def SetLowMark(self, request: wire.MarkRequest, origin: Origin) -> ReplicaStatus:
        target = request.target
        contact = _contact(target)
        return await self._calls.set_low_mark(target.partition, _session(target), request.mark, contact=contact)

    async def Truncate(self, request: wire.MarkRequest, origin: Origin) -> ReplicaStatus:
        target = request.target
        return await self._calls.truncate(target.partition, _session(target), request.mark, contact=_contact(target))

    async def Fork(self, request: wire.ForkRequest, origin: Origin) -> ReplicaStatus:
        target, lineage = request.target, lineage_of_messages(request.timelines)
        return await self._calls.fork(target.partition, _session(target), lineage, contact=_contact(target))

    async def Read(self, request: wire.ReadRequest, origin: Origin) -> AsyncGenerator[Content, None]:
        target = request.target
        session, last_id = _optional_session(target, origin), request.last_id if request.HasField("last_id") else None
        place, contact = (request.first_id, last_id, request.frame_bytes), _contact(target)
        found: AsyncGenerator[Content, None]
        if request.form == wire.READ_FORM_WHOLE:
            found = self._calls.read_whole(target.partition, _session(target), *place, contact=contact)
        else:
            with_locks = request.form == wire.READ_FORM_LOCKS
            timeline = uuid_of(request.timeline, "a timeline") if request.HasField("timeline") else None
            found = self._calls.read(
                target.partition, session, *place, contact=contact, with_locks=with_locks, timeline=timeline
            )
        async with aclosing(found) as contents:
            async for content in contents:
                yield content

    async def ReadLocks(self, request: wire.LocksRequest, origin: Origin) -> LockHistory | None:
        target = request.target
        _optional_session(target, origin)
        return await self._calls.read_locks(
            target.partition, _session(target), request.last_id, request.bytes_max, contact=_contact(target)
        )

    async def FindMarks(self, request: wire.MarksRequest, origin: Origin) -> LockMarks:
        target = request.target
        _optional_session(target, origin)
        query = to_value(LockQuery, request)
        return await self._calls.find_marks(target.partition, _session(target), query, contact=_contact(target))

    async def FindTime(self, request: wire.TimeRequest, origin: Origin) -> int:
        target = request.target
        _optional_session(target, origin)
        return await self._calls.find_time(target.partition, _session(target), request.time, contact=_contact(target))

    async def ListSegments(self, request: wire.SegmentsRequest, origin: Origin) -> list[tuple[int, int, int]]:
        target = request.target
        return self._calls.segments(target.partition, _optional_session(target, origin), contact=_contact(target))

    async def Archive(self, request: wire.ArchiveRequest, origin: Origin) -> Archived:
        target, known = request.target, to_value(Archived, request.known)
        lineage = lineage_of_messages(request.timelines)
        return await self._calls.archiver.add(
            target.partition, _session(target), known, lineage, with_keys=request.with_keys, contact=_contact(target)
        )

    async def CheckArchive(self, request: wire.CheckArchiveRequest, origin: Origin) -> ArchiveCheck:
        target, known = request.target, to_value(Archived, request.known)
        return await self._calls.archiver.check(
            target.partition, _session(target), known, request.first_id, contact=_contact(target)
        )

    async def Trim(self, request: wire.MarkRequest, origin: Origin) -> ReplicaStatus:
        target = request.target
        known = to_value(Archived, request.archived) if request.HasField("archived") else None
        return await self._calls.trim(
            target.partition, _session(target), request.mark, known, needs_none=request.needs_none,
            contact=_contact(target),
        )  # fmt: skip

    async def BackUp(self, request: wire.BackUpRequest, origin: Origin) -> BackedUp:
        target, known = request.target, to_value(Archived, request.known)
        return await self._calls.archiver.back_up(
            target.partition, _session(target), known, request.committed, request.moment,
            lineage_of_messages(request.timelines), contact=_contact(target),
        )  # fmt: skip

    async def SaveMetadata(self, request: wire.MetadataRequest, origin: Origin) -> int:
        archive = uuid_of(request.archive, "an archive") if request.HasField("archive") else None
        return await self._calls.archiver.save_metadata(_inflated(request.text), archive)


def _inflated(data: bytes) -> bytes:
    """Inflate a text of bounded size."""
    inflating = zlib.decompressobj()
    try:
        text = inflating.decompress(data, METADATA_BYTES_MAX + 1)
    except zlib.error as error:
        raise BadFrame(f"the metadata of a cluster cannot be inflated: {error}") from error
    if len(text) <= METADATA_BYTES_MAX and not inflating.eof:
        raise BadFrame("the metadata of a cluster ends in the middle")
    return text


class StorageAdminService(_Service):
    async def Describe(self, request: wire.DescribeRequest, origin: Origin) -> StorageDescription:
        return replace(await self._calls.describe(), vitals=vitals())

    async def Events(self, request: wire.EventsRequest, origin: Origin) -> Events:
        return logs.RECENT.after(request.after)

    async def _for_each(
        self, partitions: Sequence[int], call: Callable[[int], Awaitable[str | None]]
    ) -> Mapping[int, WaltzError | str]:
        """Make a call for each partition; return its result or error. A failure does not stop the other partitions."""
        if len(partitions) > self._calls.directory.control.header.partitions + 1:  # one more for the group log
            raise TooLarge(f"{len(partitions)} partitions were named; the cluster has fewer")
        results: dict[int, WaltzError | str] = {}
        for number in partitions:
            try:
                results[number] = await call(number) or ""
            except WaltzError as error:
                results[number] = error
        return results

    async def CreatePartitions(self, request: wire.PartitionsRequest, origin: Origin) -> Mapping[int, WaltzError | str]:
        async def create(number: int) -> None:
            await self._learn_name(origin)
            await self._calls.create_partition(number)

        return await self._for_each(request.partitions, create)

    async def RemovePartitions(self, request: wire.RemoveRequest, origin: Origin) -> Mapping[int, WaltzError | str]:
        async def remove(number: int) -> str | None:
            return await self._calls.remove_partition(number, delete_files=request.delete_files)

        return await self._for_each(request.partitions, remove)

    async def SetAvailable(self, request: wire.AvailabilityRequest, origin: Origin) -> Mapping[int, WaltzError | str]:
        async def change(number: int) -> None:
            await self._calls.set_available(number, request.available)

        return await self._for_each(request.partitions, change)

    async def Fence(self, request: wire.FenceRequest, origin: Origin) -> ReplicaStatus:
        return await self._calls.fence(request.partition, request.session)

    async def Restore(self, request: wire.RestoreRequest, origin: Origin) -> AsyncGenerator[Restoring, None]:
        await self._learn_name(origin)
        async with aclosing(self._calls.restorer.restore(to_value(RestoreOrder, request.order))) as states:
            async for state in states:
                yield state

    async def DeleteSetAside(self, request: wire.SetAsideRequest, origin: Origin) -> Sequence[SetAside]:
        return await self._calls.delete_aside(request.names)

    async def Digest(self, request: wire.DigestRequest, origin: Origin) -> Digest:
        return await self._calls.digest(request.partition, request.first_id, request.last_id)

    async def Verify(self, request: wire.VerifyRequest, origin: Origin) -> AsyncGenerator[Finding | VerifySummary, None]:
        for number in request.partitions or self._calls.directory.errors():
            async for found in self._calls.verify(number):
                yield (
                    found
                    if isinstance(found, Finding)
                    else VerifySummary(
                        partition=number,
                        segments=found.segments,
                        records=found.records,
                        bytes=found.bytes,
                        findings=len(found.findings),
                    )
                )
