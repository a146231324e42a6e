"""The gRPC service of a server for applications: messages to calls, errors to statuses. It decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeAlias
from urllib.parse import unquote
from uuid import UUID

import grpc.aio

from waltzd.cluster.groups import GroupMeta
from waltzd.daemon.health_service import add_health
from waltzd.daemon.readiness import Unready
from waltzd.errors import CannotConnect, WaltzError
from waltzd.protocol.audit import DEAF, Auditor
from waltzd.protocol.batches import ClientFrame, Introduction, ServerFrame
from waltzd.protocol.groups import DeliveryFrame, MemberFrame
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import FIRST
from waltzd.server.clients.calls import ServerCalls
from waltzd.server.clients.evidence import MountEvidence
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.codec import client_frames, key_of, run_message, server_message, to_message, to_value, uuid_of
from waltzd.wire.groups import delivery_message, member_frames
from waltzd.wire.grpc import Server, abort, caller_of, peer_of
from waltzd.wire.listener import first_message, next_message
from waltzd.wire.wire_pb2_grpc import LogServicer, add_LogServicer_to_server

LOG = wire.DESCRIPTOR.services_by_name["Log"].full_name
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class _GrpcLink:
    """The stream of one mount."""

    def __init__(self, context: Context, evidence: MountEvidence) -> None:
        self._context = context
        self._evidence = evidence
        self._is_first = True

    @property
    def peer(self) -> str:
        """As plain connections say it: gRPC puts the kind of the address in front, and escapes brackets."""
        return unquote(str(self._context.peer()).removeprefix("ipv4:").removeprefix("ipv6:"))

    @property
    def identity(self) -> str:
        return _identity(self._context)

    quiet_seconds = None
    """gRPC keeps its heartbeats to itself."""

    async def receive(self) -> Sequence[ClientFrame] | None:
        is_first, self._is_first = self._is_first, False
        try:
            message = await (first_message if is_first else next_message)(self._context)
        except grpc.aio.BaseError as error:
            raise CannotConnect(f"{self.peer} has gone") from error
        if message is grpc.aio.EOF:
            return None
        assert isinstance(message, wire.ClientFrame)
        frames = client_frames(message)
        self._evidence.said(frames)
        return frames

    async def send(self, frames: Sequence[ServerFrame]) -> None:
        self._evidence.told(frames)
        await _write(self._context, server_message(frames))

    @property
    def may_post(self) -> bool:
        return False

    def post(self, frames: Sequence[ServerFrame]) -> None:
        raise AssertionError("gRPC takes nothing without waiting")


class _AttendLink:
    """The stream of one member of a durable group."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._is_first = True

    @property
    def peer(self) -> str:
        return unquote(str(self._context.peer()).removeprefix("ipv4:").removeprefix("ipv6:"))

    @property
    def identity(self) -> str:
        return _identity(self._context)

    async def receive(self) -> Sequence[MemberFrame] | None:
        is_first, self._is_first = self._is_first, False
        try:
            message = await (first_message if is_first else next_message)(self._context)
        except grpc.aio.BaseError as error:
            raise CannotConnect(f"{self.peer} has gone") from error
        if message is grpc.aio.EOF:
            return None
        assert isinstance(message, wire.MemberFrame)
        return member_frames(message)

    async def send(self, frames: Sequence[DeliveryFrame]) -> None:
        await _write(self._context, delivery_message(frames))


def _timeline(request: wire.PartitionRequest | wire.FetchRecordsRequest) -> UUID:
    return uuid_of(request.timeline, "a timeline") if request.HasField("timeline") else FIRST


def _packed(timeline: UUID) -> bytes | None:
    return None if timeline == FIRST else timeline.bytes


class LogService(LogServicer):
    def __init__(self, calls: ServerCalls, auditor: Auditor) -> None:
        self._calls = calls
        self._auditor = auditor

    async def Locate(self, request: wire.LocateRequest, context: Context) -> wire.Topology:
        try:
            return to_message(wire.Topology, await self._calls.located(_identity(context)))
        except WaltzError as error:
            await abort(context, error)

    async def Register(self, request: wire.RegisterRequest, context: Context) -> wire.Registration:
        try:
            introduction = to_value(Introduction, request)
            found = await self._calls.register(key_of(request.cluster_key), _identity(context), introduction)
            return to_message(wire.Registration, found)
        except WaltzError as error:
            await abort(context, error)

    async def HighWaterMark(self, request: wire.PartitionRequest, context: Context) -> wire.MarkReply:
        try:
            key, confirmed = key_of(request.cluster_key), request.confirmed
            who = _identity(context)
            since = None
            if request.HasField("position"):
                since = Position(request.position, _timeline(request))
            mark = await self._calls.high_water_mark(key, request.partition, confirmed=confirmed, since=since, identity=who)
            return wire.MarkReply(mark=mark, confirmed=confirmed, timeline=_packed(mark.timeline))
        except WaltzError as error:
            await abort(context, error)

    async def FindTime(self, request: wire.FindTimeRequest, context: Context) -> wire.MarkReply:
        try:
            key = key_of(request.cluster_key)
            mark = await self._calls.find_time(key, request.partition, request.time, identity=_identity(context))
            return wire.MarkReply(mark=mark, timeline=_packed(mark.timeline))
        except WaltzError as error:
            await abort(context, error)

    # gRPC takes a coroutine that writes to the context as well as an iterator; the generated types know only the latter.
    # A coroutine is ended with the call, whatever it waits for; an iterator could be left lying about.
    async def Fetch(self, request: wire.FetchRecordsRequest, context: Context) -> None:  # type: ignore[override]
        try:
            key, last_id = key_of(request.cluster_key), request.last_id if request.HasField("last_id") else None
            found = self._calls.fetch(
                key,
                request.partition,
                request.first_id,
                last_id,
                with_locks=request.with_locks,
                timeline=_timeline(request) if request.HasField("timeline") else None,
                identity=_identity(context),
            )
            async with aclosing(found) as runs:
                async for run in runs:
                    await _write(context, run_message(run))
        except WaltzError as error:
            await _abort(context, error)

    async def Mount(self, request_iterator: object, context: Context) -> None:  # type: ignore[override]
        evidence = MountEvidence(self._auditor, who=_identity(context), peer=peer_of(context))
        try:
            await self._calls.mount(_GrpcLink(context, evidence))
        except WaltzError as error:
            await _abort(context, error)
        finally:
            evidence.ended()

    async def Attend(self, request_iterator: object, context: Context) -> None:  # type: ignore[override]
        try:
            await self._calls.attend(_AttendLink(context))
        except WaltzError as error:
            await _abort(context, error)

    async def MakeGroup(self, request: wire.MakeGroupRequest, context: Context) -> wire.MadeGroup:
        try:
            key, who = key_of(request.cluster_key), _identity(context)
            self._calls.check_group(key, request.meta.name, who)
            found = await self._calls.make_group(key, to_value(GroupMeta, request.meta), who)
            return to_message(wire.MadeGroup, found)
        except WaltzError as error:
            await abort(context, error)

    async def GetGroup(self, request: wire.GetGroupRequest, context: Context) -> wire.MadeGroup:
        try:
            found = await self._calls.get_group(key_of(request.cluster_key), request.name, _identity(context))
            return to_message(wire.MadeGroup, found)
        except WaltzError as error:
            await abort(context, error)


def _identity(context: Context) -> str:
    found = caller_of(context)
    return "" if found is None else found.uri


async def _write(context: Context, message: Any) -> None:
    try:
        await context.write(message)
    except grpc.aio.BaseError as error:
        raise CannotConnect(f"{context.peer()} has gone") from error


async def _abort(context: Context, error: WaltzError) -> None:
    if context.done():  # the caller has gone
        return
    with suppress(grpc.aio.InternalError, grpc.aio.UsageError):  # it goes at this moment
        await abort(context, error)


def add_log_service(server: Server, calls: ServerCalls, unready: Unready | None = None, auditor: Auditor = DEAF) -> None:
    """With `unready`, gRPC's health service as well."""
    add_LogServicer_to_server(LogService(calls, auditor), server)
    if unready is not None:
        add_health(server, {LOG: True}, unready)
