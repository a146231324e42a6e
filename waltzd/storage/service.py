"""The two gRPC services of a storage: messages to calls, errors to statuses. No decision is made here."""

from __future__ import annotations

import asyncio
import functools
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from time import time_ns
from typing import Any, NoReturn, TypeAlias, TypeVar
from uuid import UUID

import grpc.aio

from waltzd.archive.metadata import METADATA_BYTES_MAX
from waltzd.daemon import logs
from waltzd.daemon.audit import AuditLog
from waltzd.daemon.health_service import add_health, add_reflection
from waltzd.daemon.process import vitals
from waltzd.daemon.readiness import Unready
from waltzd.errors import BadFrame, NotPermitted, TooLarge, WaltzError
from waltzd.format.finding import Finding
from waltzd.format.record import Run
from waltzd.protocol.descriptions import Archived, ReplicaStatus, RestoreOrder
from waltzd.protocol.peers import SECRET_BYTES, Contact
from waltzd.protocol.role import Role, roles_at
from waltzd.storage.calls import StorageCalls
from waltzd.storage.stream_port import StreamPort
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.codec import (
    detail_of,
    key_of,
    lineage_of_messages,
    lock_history_message,
    pieces_message,
    run_message,
    to_message,
    to_value,
    uuid_of,
)
from waltzd.wire.grpc import INSTANCE_KEY, STORAGE_KEY, Server, abort, caller_of
from waltzd.wire.limits import REQUEST_BYTES_MAX
from waltzd.wire.listener import Listener
from waltzd.wire.tasks import on_loop
from waltzd.wire.tls import Tls
from waltzd.wire.wire_pb2_grpc import (
    ReplicaServicer,
    StorageAdminServicer,
    add_ReplicaServicer_to_server,
    add_StorageAdminServicer_to_server,
)

REPLICA = wire.DESCRIPTOR.services_by_name["Replica"].full_name
ADMIN = wire.DESCRIPTOR.services_by_name["StorageAdmin"].full_name
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


def meant_of(context: Context) -> tuple[str, UUID | None]:
    """The storage that the caller means, and the process of it: empty and None where it does not say."""
    said = dict(context.invocation_metadata() or ())
    name, instance = said.get(STORAGE_KEY, b""), said.get(INSTANCE_KEY)
    assert isinstance(name, bytes)
    assert isinstance(instance, bytes | None)
    return name.decode("utf-8", "replace"), None if instance is None else uuid_of(instance, "an instance")


def _session(target: wire.Target) -> int:
    if not target.HasField("session"):
        raise BadFrame("this call needs a session")
    return target.session


def _contact(target: wire.Target) -> Contact:
    return Contact(target.contact, target.secret)


def _optional_session(target: wire.Target, context: Context) -> int | None:
    """A reader with a session sees records that are not committed yet, so only a server may say one."""
    if not target.HasField("session"):
        return None
    caller = caller_of(context)
    if caller is not None and caller.role is not Role.SERVER:
        raise NotPermitted(f"{caller.name} has the role {caller.role}; only a server reads with a session")
    return target.session


class _Service:
    def __init__(self, calls: StorageCalls) -> None:
        self._calls = calls

    def _check(self, key: bytes, context: Context) -> None:
        """The call is meant for this cluster, this storage and this process."""
        self._calls.check_key(key_of(key))
        self._calls.directory.check_meant(*meant_of(context))

    async def _learn_name(self, context: Context) -> None:
        """The first caller that puts a storage to work says its name; its directory remembers that."""
        name, _ = meant_of(context)
        if name and not self._calls.directory.name:
            await self._calls.take_name(name)

    async def refuse(self, context: Context, error: WaltzError) -> NoReturn:
        await abort(context, error)


S = TypeVar("S", bound=_Service)
Q = TypeVar("Q")
R = TypeVar("R")


def _answered(call: Callable[[S, Q, Context], Awaitable[R]]) -> Callable[[S, Q, Context], Coroutine[Any, Any, R]]:
    """One request, one reply; an error becomes the status of the call."""

    @functools.wraps(call)
    async def answer(self: S, request: Q, context: Context) -> R:
        try:
            return await call(self, request, context)
        except WaltzError as error:
            await self.refuse(context, error)

    return answer


class ReplicaService(_Service, ReplicaServicer):
    def __init__(self, calls: StorageCalls, stream_port: int) -> None:
        super().__init__(calls)
        self._stream_port = stream_port

    async def refuse(self, context: Context, error: WaltzError) -> NoReturn:
        self._calls.answered.refused_calls += 1
        await abort(context, error)

    @_answered
    async def Open(self, request: wire.OpenRequest, context: Context) -> wire.ReplicaStatus:
        target = request.target
        self._check(target.cluster_key, context)
        if target.HasField("session"):
            await self._learn_name(context)
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
        message = to_message(wire.ReplicaStatus, status)
        message.stream_port, message.time = self._stream_port, time_ns() // 1000
        return message

    @_answered
    async def Quiet(self, request: wire.QuietRequest, context: Context) -> wire.QuietReply:
        self._check(request.cluster_key, context)
        return wire.QuietReply(partitions=self._calls.quiet(request.partitions))

    @_answered
    async def SetLowMark(self, request: wire.MarkRequest, context: Context) -> wire.ReplicaStatus:
        return await self._mark(self._calls.set_low_mark, request, context)

    @_answered
    async def Truncate(self, request: wire.MarkRequest, context: Context) -> wire.ReplicaStatus:
        return await self._mark(self._calls.truncate, request, context)

    @_answered
    async def Fork(self, request: wire.ForkRequest, context: Context) -> wire.ReplicaStatus:
        target = request.target
        self._check(target.cluster_key, context)
        lineage = lineage_of_messages(request.timelines)
        status = await self._calls.fork(target.partition, _session(target), lineage, contact=_contact(target))
        return to_message(wire.ReplicaStatus, status)

    async def _mark(
        self, call: Callable[..., Awaitable[ReplicaStatus]], request: wire.MarkRequest, context: Context
    ) -> wire.ReplicaStatus:
        target = request.target
        self._check(target.cluster_key, context)
        status = await call(target.partition, _session(target), request.mark, contact=_contact(target))
        return to_message(wire.ReplicaStatus, status)

    async def Read(self, request: wire.ReadRequest, context: Context) -> AsyncIterator[wire.RunFrame]:
        try:
            target = request.target
            self._check(target.cluster_key, context)
            session, last_id = _optional_session(target, context), request.last_id if request.HasField("last_id") else None
            place, contact = (request.first_id, last_id, request.frame_bytes), _contact(target)
            if request.form == wire.READ_FORM_WHOLE:
                whole = self._calls.read_whole(target.partition, _session(target), *place, contact=contact)
                async with aclosing(whole):
                    async for content in whole:
                        yield pieces_message((content,) if isinstance(content, Run) else content)
                return
            with_locks = request.form == wire.READ_FORM_LOCKS
            runs = self._calls.read(target.partition, session, *place, contact=contact, with_locks=with_locks)
            async with aclosing(runs):
                async for run in runs:
                    yield run_message(run)
        except WaltzError as error:
            await self.refuse(context, error)

    @_answered
    async def ReadLocks(self, request: wire.LocksRequest, context: Context) -> wire.LocksReply:
        target = request.target
        self._check(target.cluster_key, context)
        _optional_session(target, context)
        found = await self._calls.read_locks(
            target.partition, _session(target), request.last_id, request.bytes_max, contact=_contact(target)
        )
        return lock_history_message(found)

    @_answered
    async def FindTime(self, request: wire.TimeRequest, context: Context) -> wire.MarkReply:
        target = request.target
        self._check(target.cluster_key, context)
        _optional_session(target, context)
        mark = await self._calls.find_time(target.partition, _session(target), request.time, contact=_contact(target))
        return wire.MarkReply(mark=mark)

    @_answered
    async def ListSegments(self, request: wire.SegmentsRequest, context: Context) -> wire.SegmentList:
        target = request.target
        self._check(target.cluster_key, context)
        session = _optional_session(target, context)
        found = self._calls.segments(target.partition, session, contact=_contact(target))
        return wire.SegmentList(
            segments=[wire.Segment(first_id=first, last_id=last, bytes=size) for first, last, size in found]
        )

    @_answered
    async def Archive(self, request: wire.ArchiveRequest, context: Context) -> wire.Archived:
        target = request.target
        self._check(target.cluster_key, context)
        known, lineage = to_value(Archived, request.known), lineage_of_messages(request.timelines)
        found = await self._calls.archiver.add(target.partition, _session(target), known, lineage, contact=_contact(target))
        return to_message(wire.Archived, found)

    @_answered
    async def CheckArchive(self, request: wire.CheckArchiveRequest, context: Context) -> wire.ArchiveCheck:
        target = request.target
        self._check(target.cluster_key, context)
        known, contact = to_value(Archived, request.known), _contact(target)
        found = await self._calls.archiver.check(
            target.partition, _session(target), known, request.first_id, contact=contact
        )
        return to_message(wire.ArchiveCheck, found)

    @_answered
    async def Trim(self, request: wire.MarkRequest, context: Context) -> wire.ReplicaStatus:
        target = request.target
        self._check(target.cluster_key, context)
        known = to_value(Archived, request.archived) if request.HasField("archived") else None
        status = await self._calls.trim(
            target.partition, _session(target), request.mark, known, needs_none=request.needs_none,
            contact=_contact(target),
        )  # fmt: skip
        return to_message(wire.ReplicaStatus, status)

    @_answered
    async def BackUp(self, request: wire.BackUpRequest, context: Context) -> wire.BackedUp:
        target, known = request.target, to_value(Archived, request.known)
        self._check(target.cluster_key, context)
        found = await self._calls.archiver.back_up(
            target.partition, _session(target), known, request.committed, request.moment,
            lineage_of_messages(request.timelines), contact=_contact(target),
        )  # fmt: skip
        return to_message(wire.BackedUp, found)

    @_answered
    async def SaveMetadata(self, request: wire.MetadataRequest, context: Context) -> wire.MetadataSaved:
        self._check(request.cluster_key, context)
        archive = uuid_of(request.archive, "an archive") if request.HasField("archive") else None
        return wire.MetadataSaved(number=await self._calls.archiver.save_metadata(_inflated(request.text), archive))


def _inflated(data: bytes) -> bytes:
    """A text that was compressed, as long as it may be and no longer."""
    inflating = zlib.decompressobj()
    try:
        text = inflating.decompress(data, METADATA_BYTES_MAX + 1)
    except zlib.error as error:
        raise BadFrame(f"the metadata of a cluster cannot be inflated: {error}") from error
    if len(text) <= METADATA_BYTES_MAX and not inflating.eof:
        raise BadFrame("the metadata of a cluster ends in the middle")
    return text


class StorageAdminService(_Service, StorageAdminServicer):
    @_answered
    async def Describe(self, request: wire.DescribeRequest, context: Context) -> wire.StorageDescription:
        self._calls.directory.check_meant(*meant_of(context))
        return to_message(wire.StorageDescription, replace(await self._calls.describe(), vitals=vitals()))

    @_answered
    async def Events(self, request: wire.EventsRequest, context: Context) -> wire.EventsReply:
        self._calls.directory.check_meant(*meant_of(context))
        return to_message(wire.EventsReply, logs.RECENT.after(request.after))

    async def _for_each(
        self, key: bytes, partitions: Sequence[int], context: Context, call: Callable[[int], Awaitable[str | None]]
    ) -> wire.PartitionsReply:
        """Each partition by itself: one that fails does not keep the others from being done."""
        self._check(key, context)
        if len(partitions) > self._calls.directory.control.header.partitions + 1:  # and the group log
            raise TooLarge(f"{len(partitions)} partitions were named; the cluster has fewer")
        results: list[wire.PartitionResult] = []
        for number in partitions:
            try:
                results.append(wire.PartitionResult(partition=number, set_aside=await call(number) or ""))
            except WaltzError as error:
                results.append(wire.PartitionResult(partition=number, error=detail_of(error)))
        return wire.PartitionsReply(results=results)

    @_answered
    async def CreatePartitions(self, request: wire.PartitionsRequest, context: Context) -> wire.PartitionsReply:
        async def create(number: int) -> None:
            await self._learn_name(context)
            await self._calls.create_partition(number)

        return await self._for_each(request.cluster_key, request.partitions, context, create)

    @_answered
    async def RemovePartitions(self, request: wire.RemoveRequest, context: Context) -> wire.PartitionsReply:
        async def remove(number: int) -> str | None:
            return await self._calls.remove_partition(number, delete_files=request.delete_files)

        return await self._for_each(request.cluster_key, request.partitions, context, remove)

    @_answered
    async def SetAvailable(self, request: wire.AvailabilityRequest, context: Context) -> wire.PartitionsReply:
        async def change(number: int) -> None:
            await self._calls.set_available(number, request.available)

        return await self._for_each(request.cluster_key, request.partitions, context, change)

    @_answered
    async def Fence(self, request: wire.FenceRequest, context: Context) -> wire.ReplicaStatus:
        self._check(request.cluster_key, context)
        return to_message(wire.ReplicaStatus, await self._calls.fence(request.partition, request.session))

    async def Restore(self, request: wire.RestoreRequest, context: Context) -> AsyncIterator[wire.Restoring]:
        try:
            self._check(request.cluster_key, context)
            await self._learn_name(context)
            async with aclosing(self._calls.restorer.restore(to_value(RestoreOrder, request.order))) as states:
                async for state in states:
                    yield to_message(wire.Restoring, state)
        except WaltzError as error:
            await self.refuse(context, error)

    @_answered
    async def DeleteSetAside(self, request: wire.SetAsideRequest, context: Context) -> wire.SetAsideReply:
        self._check(request.cluster_key, context)
        deleted = await self._calls.delete_aside(request.names)
        return wire.SetAsideReply(deleted=[to_message(wire.SetAside, one) for one in deleted])

    @_answered
    async def Digest(self, request: wire.DigestRequest, context: Context) -> wire.DigestReply:
        self._check(request.cluster_key, context)
        found = await self._calls.digest(request.partition, request.first_id, request.last_id)
        return wire.DigestReply(hash=found.hash, last_id=found.last_id, records=found.records, bytes=found.bytes)

    async def Verify(self, request: wire.VerifyRequest, context: Context) -> AsyncIterator[wire.VerifyReply]:
        try:
            self._check(request.cluster_key, context)
            for number in request.partitions or self._calls.directory.errors():
                async for found in self._calls.verify(number):
                    if isinstance(found, Finding):
                        yield wire.VerifyReply(finding=to_message(wire.Finding, found))
                    else:
                        summary = wire.VerifySummary(
                            partition=number,
                            segments=found.segments,
                            records=found.records,
                            bytes=found.bytes,
                            findings=len(found.findings),
                        )
                        yield wire.VerifyReply(summary=summary)
        except WaltzError as error:
            await self.refuse(context, error)


@dataclass(frozen=True)
class Ports:
    """The listeners of a storage: for servers, for their append streams, and for operators."""

    replicas: Listener
    streams: StreamPort
    admin: Listener
    streams_loop: asyncio.AbstractEventLoop | None

    async def knock(self) -> list[str]:
        """Why a caller does not get in."""
        return [*await self.replicas.knock(), *await self.admin.knock()]

    async def stop(self, seconds: float) -> None:
        """No new calls; running ones may go on for so long."""
        streams = on_loop(self.streams_loop, self.streams.stop(seconds))
        await asyncio.gather(self.replicas.stop(seconds), streams, self.admin.stop(seconds))


async def start_services(
    calls: StorageCalls,
    tls: Tls | None,
    unready: Callable[[Ports], Unready],
    audit: AuditLog,
    *,
    on_fatal: Callable[[BaseException], None],
) -> Ports:
    config = calls.config
    replicas = Listener(config.listen, REQUEST_BYTES_MAX, tls, audit, roles=roles_at(REPLICA))
    streams = StreamPort(calls, replace(config.listen, port=config.stream_port), tls, audit)
    admin = Listener(config.admin_listen, REQUEST_BYTES_MAX, tls, audit, roles=roles_at(ADMIN))
    await on_loop(calls.streams_loop, streams.start(on_fatal))
    service = ReplicaService(calls, streams.address.port)
    await replicas.start(lambda server: add_ReplicaServicer_to_server(service, server), on_fatal=on_fatal)
    ports = Ports(replicas, streams, admin, calls.streams_loop)
    await admin.start(lambda server: _add_admin_services(calls, server, unready(ports)), on_fatal=on_fatal)
    return ports


def _add_admin_services(calls: StorageCalls, server: Server, unready: Unready) -> None:
    add_StorageAdminServicer_to_server(StorageAdminService(calls), server)
    add_health(server, {ADMIN: False}, unready, is_ending=lambda: calls.is_draining)
    add_reflection(server, [ADMIN])
