"""The gRPC service of a server for applications: requests to calls. It decides nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar
from uuid import UUID

import grpc.aio

from waltzd.cluster.groups import GroupMeta, MadeGroup
from waltzd.errors import CannotConnect, WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.format.key_index import LockQuery
from waltzd.format.layout import ID_MAX
from waltzd.format.record import Run
from waltzd.protocol.audit import NO_AUDIT, Auditor
from waltzd.protocol.batches import ClientFrame, Introduction, Registration, ServerFrame, SingleAppend, Topology
from waltzd.protocol.groups import Change, Changed, GroupStatus, ParkedList
from waltzd.protocol.locks import HistoryPart, MarkedPage, MarkedQuery
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import FIRST
from waltzd.server.clients.calls import ServerCalls
from waltzd.server.clients.mounts import MountAudit
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.calls import ATTEND, MOUNT, Call
from waltzd.wire.codec import client_frames, key_of, member_frames, to_value, uuid_of
from waltzd.wire.grpc import caller_of, peer_of
from waltzd.wire.listener import first_message, next_message
from waltzd.wire.servicer import Context, Host, Origin, abort_stream, write

Received = TypeVar("Received")
Sent = TypeVar("Sent")


class _Link(Generic[Received, Sent]):
    """The stream of a mount, or of a member of a consumer group."""

    quiet_seconds = None
    """gRPC does not report its heartbeats."""

    def __init__(self, context: Context, call: Call[Sequence[Sent]], unpack: Callable[[Any], Sequence[Received]]) -> None:
        self.peer = peer_of(context)
        self.identity = _identity(context)
        self._context = context
        self._call = call
        self._unpack = unpack
        self._is_first = True

    async def receive(self) -> Sequence[Received] | None:
        is_first, self._is_first = self._is_first, False
        try:
            message = await (first_message if is_first else next_message)(self._context)
        except grpc.aio.BaseError as error:
            raise CannotConnect(f"{self.peer} has gone") from error
        return None if message is grpc.aio.EOF else self._unpack(message)

    async def send(self, frames: Sequence[Sent]) -> None:
        await write(self._context, self._call.pack(frames))


class _MountLink(_Link[ClientFrame, ServerFrame]):
    takes_singles = False

    def __init__(self, context: Context, audit: MountAudit) -> None:
        super().__init__(context, MOUNT, client_frames)
        self._audit = audit

    async def receive(self) -> Sequence[ClientFrame] | None:
        frames = await super().receive()
        if frames is not None:
            self._audit.note_received(frames)
        return frames

    def hear_singles(self, taker: Callable[[SingleAppend], bool]) -> None:
        """Ignore the taker: all frames are received."""

    async def send(self, frames: Sequence[ServerFrame]) -> None:
        self._audit.note_sent(frames)
        await super().send(frames)

    @property
    def may_post(self) -> bool:
        return False

    def post(self, frames: Sequence[ServerFrame]) -> None:
        raise AssertionError("gRPC takes nothing without waiting")


def _identity(context: Context) -> str:
    found = caller_of(context)
    return "" if found is None else found.uri


def _timeline(request: wire.PartitionRequest | wire.FetchRecordsRequest | wire.FetchMarkedRequest) -> UUID:
    return uuid_of(request.timeline, "a timeline") if request.HasField("timeline") else FIRST


def _last_id(request: wire.HistoryRequest | wire.FetchMarkedRequest) -> int:
    """Return the last id of a range; -1 if all ids are behind it."""
    return max(0, request.before) - 1 if request.HasField("before") else ID_MAX


class LogService(Host):
    """The service `Log`. The calls themselves check the cluster key."""

    def __init__(self, calls: ServerCalls, auditor: Auditor = NO_AUDIT) -> None:
        self._calls = calls
        self._auditor = auditor

    async def Locate(self, request: wire.LocateRequest, origin: Origin) -> Topology:
        return await self._calls.located(origin.uri)

    async def Register(self, request: wire.RegisterRequest, origin: Origin) -> Registration:
        introduction = to_value(Introduction, request)
        return await self._calls.register(key_of(request.cluster_key), origin.uri, introduction)

    async def HighWaterMark(self, request: wire.PartitionRequest, origin: Origin) -> tuple[Position, bool]:
        key, confirmed, who = key_of(request.cluster_key), request.confirmed, origin.uri
        since = Position(request.position, _timeline(request)) if request.HasField("position") else None
        mark = await self._calls.high_water_mark(key, request.partition, confirmed=confirmed, since=since, identity=who)
        return mark, confirmed

    async def FindTime(self, request: wire.FindTimeRequest, origin: Origin) -> Position:
        key = key_of(request.cluster_key)
        return await self._calls.find_time(key, request.partition, request.time, identity=origin.uri)

    async def History(self, request: wire.HistoryRequest, origin: Origin) -> HistoryPart:
        query = LockQuery(
            lock=request.lock, first_id=request.after + 1, last_id=_last_id(request), limit=request.limit,
            newest_first=request.newest_first,
        )  # fmt: skip
        return await self._calls.history(
            key_of(request.cluster_key), request.partition, query, confirmed=request.confirmed, identity=origin.uri,
            sent=origin.sent,
        )  # fmt: skip

    async def FetchMarked(self, request: wire.FetchMarkedRequest, origin: Origin) -> MarkedPage:
        locks, ends = tuple(request.locks), list(accumulate(request.group_sizes, initial=0))
        if ends[-1] != len(locks):
            raise BadFrame(f"a question has {len(locks)} locks in groups of {ends[-1]}")
        query = MarkedQuery(
            groups=tuple(locks[start:stop] for start, stop in pairwise(ends)),
            first_id=request.after + 1,
            last_id=_last_id(request),
            limit=request.limit,
            newest_first=request.newest_first,
        )
        return await self._calls.fetch_marked(
            key_of(request.cluster_key),
            request.partition,
            query,
            confirmed=request.confirmed,
            reach=request.reach,
            since=Position(request.position, _timeline(request)) if request.HasField("position") else None,
            identity=origin.uri,
            sent=origin.sent,
        )

    async def Fetch(self, request: wire.FetchRecordsRequest, origin: Origin) -> AsyncGenerator[Run, None]:
        found = self._calls.fetch(
            key_of(request.cluster_key),
            request.partition,
            request.first_id,
            request.last_id if request.HasField("last_id") else None,
            with_locks=request.with_locks,
            timeline=_timeline(request) if request.HasField("timeline") else None,
            identity=origin.uri,
        )
        async with aclosing(found) as runs:
            async for run in runs:
                yield run

    async def Mount(self, request_iterator: object, context: Context) -> None:
        audit = MountAudit(self._auditor, who=_identity(context), peer=peer_of(context))
        try:
            await self._calls.mount(_MountLink(context, audit))
        except WaltzError as error:
            await abort_stream(context, error)
        finally:
            audit.note_end()

    async def Attend(self, request_iterator: object, context: Context) -> None:
        try:
            await self._calls.attend(_Link(context, ATTEND, member_frames))
        except WaltzError as error:
            await abort_stream(context, error)

    async def MakeGroup(self, request: wire.MakeGroupRequest, origin: Origin) -> MadeGroup:
        key, who = key_of(request.cluster_key), origin.uri
        self._calls.check_group(key, request.meta.name, who)
        return await self._calls.make_group(key, to_value(GroupMeta, request.meta), who)

    async def GetGroup(self, request: wire.GetGroupRequest, origin: Origin) -> MadeGroup:
        return await self._calls.get_group(key_of(request.cluster_key), request.name, origin.uri)

    async def DescribeGroup(self, request: wire.DescribeGroupRequest, origin: Origin) -> GroupStatus:
        groups = await self._calls.owned_groups(key_of(request.cluster_key), request.name, request.partition, origin.uri)
        return await groups.status(request.name, request.partition)

    async def Parked(self, request: wire.ParkedRequest, origin: Origin) -> ParkedList:
        groups = await self._calls.owned_groups(
            key_of(request.cluster_key), request.name, request.partition, origin.uri, sent=origin.sent
        )
        await groups.level()
        return ParkedList(*groups.parked(request.name, request.partition, request.after, request.count))

    async def Replay(self, request: wire.ReplayRequest, origin: Origin) -> Changed:
        groups = await self._calls.owned_groups(key_of(request.cluster_key), request.name, request.partition, origin.uri)
        return await groups.change(request.name, None, request.partition, Change.REPLAY, list(request.ids))
