"""Clients of a server: for applications (positions, client ids, mounts, reading by id) and for operators.

They return what the server answered and decide nothing: `waltzd.client` decides when to mount again and what became of
an unanswered request. `CannotConnect` means that the outcome is unknown. A server refuses a mount by a frame in the
stream, behind everything that it had decided, because a status could overtake frames. This end takes that frame as the
end of the stream.

`stranger_at` finds out what answers at an address where no server of Waltz does, by one look at the port.

The probe changes nothing on the other side, and believes nothing beyond what kind of program it is. With TLS nothing is
sent: the process that completes the handshake has a certificate of the cluster, however slowly it answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar, cast
from uuid import UUID

import grpc.aio

from waltzd.cluster.groups import GroupList, GroupMeta, MadeGroup
from waltzd.disk.seam import Buffer
from waltzd.errors import BadArgument, CannotConnect, ForeignCluster, TlsMismatch, WaltzError
from waltzd.errors.operations import BadFrame, WrongPeer
from waltzd.format.layout import ID_MAX
from waltzd.format.record import Run
from waltzd.protocol.address import address_of_peer, parse_address
from waltzd.protocol.batches import (
    INTRODUCTION,
    ClientFrame,
    Introduction,
    Mounted,
    Refused,
    Registration,
    ServerFrame,
    SingleAppend,
    Topology,
)
from waltzd.protocol.descriptions import ClientList, Events, ServerDescription
from waltzd.protocol.groups import Change, Changed, Dismissed, GroupStatus, ParkedList
from waltzd.protocol.locks import HistoryPart, LockExplanation, MarkedPage, MarkedQuery
from waltzd.protocol.peers import AttendPort, MountPort
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.role import Role
from waltzd.wire import calls
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.calls import Call, Transport
from waltzd.wire.codec import (
    SINGLE_LOCKS_MAX,
    checked,
    client_message,
    delivery_frames,
    member_message,
    packed_client_frames,
    packed_single,
    parsed,
    server_frames,
    to_message,
    unpacked_committed,
    unpacked_error,
    unpacked_server_frames,
)
from waltzd.wire.framed_calls import FRAMED_CALLS, FramedCalls
from waltzd.wire.frames import Connection, Kind, connect
from waltzd.wire.grpc import MESSAGE_BYTES_MAX, Caller, error_of
from waltzd.wire.tls import Tls, certificate_at, speaks_tls

LOOK_SECONDS = 1.0
_HTTP2_SETTINGS = 4
_PORTS = {
    "/waltz.v1.Replica/Quiet": "the port of a storage, which is for servers",
    "/waltz.v1.ServerAdmin/Describe": "the port of a server for operators",
    "/waltz.v1.StorageAdmin/Describe": "the port of a storage for operators",
}
_NEXT = "give the address at which the servers listen for applications: `listen` in the configuration of a server"


async def stranger_at(address: str, tls: Tls | None) -> WaltzError | None:
    """Return why no gRPC server can be at an address; None if there may be one. `tls` is what we connect with."""
    try:
        place = parse_address(address)
        if tls is not None and await _may_speak_tls(address, tls):
            return None
        async with asyncio.timeout(LOOK_SECONDS):
            reader, writer = await asyncio.open_connection(place.host, place.port)
    except ConnectionRefusedError:
        return CannotConnect(f"nothing listens at {address}")
    except (OSError, ValueError, TimeoutError):
        return None
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            found = await reader.read(64)
    except TimeoutError:  # a server that hangs says nothing either
        return None
    except OSError:
        found = b""
    finally:
        writer.transport.abort()
    if found.startswith(b"HTTP/"):
        return WrongPeer(f"an HTTP server answers at {address}", next_step=_NEXT)
    if len(found) > 3 and found[3] == _HTTP2_SETTINGS:
        return None
    if tls is None and await speaks_tls(address):  # the call itself says that it needs a certificate
        return None
    return WrongPeer(f"another program answers at {address}, one that does not speak gRPC", next_step=_NEXT)


async def _may_speak_tls(address: str, tls: Tls) -> bool:
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            await certificate_at(tls, parse_address(address), role=Role.SERVER, name=None)
    except TlsMismatch:
        return False
    except CannotConnect as error:
        return not isinstance(error.__cause__, ConnectionRefusedError)
    except TimeoutError:
        return True
    return True


async def port_behind(channel: Any, address: str) -> WrongPeer:
    """Return which port of Waltz a channel has reached instead of the one for applications."""
    for call, name in _PORTS.items():
        try:
            await channel.unary_unary(call)(b"", timeout=LOOK_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE):
                continue
        return WrongPeer(f"{address} is {name}", next_step=_NEXT)
    return WrongPeer(f"another program answers at {address}, one that speaks gRPC", next_step=_NEXT)


T = TypeVar("T")
R = TypeVar("R")
Sent = TypeVar("Sent")
Received = TypeVar("Received")
_log = logging.getLogger("waltz.client")
STRANGE_SECONDS = 1.0
"""Seconds without a first answer after which the address is probed for another program."""
CALL_SECONDS = 10.0
"""Deadline of a call, and of each next message of a stream that is read to its end."""


class Servers(Transport):
    """One server as applications use it, over any transport."""

    address: str

    def __init__(self, key: UUID | None) -> None:
        """Use the cluster of the server if `key` is None."""
        self._key = key

    async def locate(self) -> Topology:
        topology = await self._ask(calls.LOCATE, wire.LocateRequest())
        if self._key is None:
            self._key = topology.cluster_key
        if self._key != topology.cluster_key:
            raise ForeignCluster(
                f"the server at {self.address} belongs to the cluster {topology.cluster_key}, not to {self._key}",
                key=topology.cluster_key,
            )
        return topology

    async def register(self, introduction: Introduction = INTRODUCTION) -> Registration:
        """Get a client id that no other client ever has. It is valid with the certificate that this process has now."""
        request = to_message(wire.RegisterRequest, introduction)
        request.cluster_key = await self._known_key()
        return await self._ask(calls.REGISTER, request)

    async def make_group(self, meta: GroupMeta) -> MadeGroup:
        request = wire.MakeGroupRequest(cluster_key=await self._known_key(), meta=to_message(wire.GroupMeta, meta))
        return await self._ask(calls.MAKE_GROUP, request)

    async def get_group(self, name: str) -> MadeGroup:
        return await self._ask(calls.GET_GROUP, wire.GetGroupRequest(cluster_key=await self._known_key(), name=name))

    async def group_status(self, name: str, partition: int) -> GroupStatus:
        request = wire.DescribeGroupRequest(cluster_key=await self._known_key(), name=name, partition=partition)
        return await self._ask(calls.DESCRIBE_GROUP, request)

    async def parked(self, name: str, partition: int, after: int, count: int) -> ParkedList:
        request = wire.ParkedRequest(
            cluster_key=await self._known_key(), name=name, partition=partition, after=after, count=count
        )
        return await self._ask(calls.PARKED, request)

    async def replay(self, name: str, partition: int, ids: Sequence[int]) -> Changed:
        request = wire.ReplayRequest(cluster_key=await self._known_key(), name=name, partition=partition, ids=ids)
        return await self._ask(calls.REPLAY, request)

    async def high_water_mark(self, partition: int, *, confirmed: bool = False, since: Position | None = None) -> Position:
        request = wire.PartitionRequest(cluster_key=await self._known_key(), partition=partition, confirmed=confirmed)
        if since is not None:
            request.position, request.timeline = since, since.timeline.bytes
        mark, is_confirmed = await self._ask(calls.HIGH_WATER_MARK, request)
        if confirmed and not is_confirmed:
            raise BadArgument(
                f"the server at {self.address} has an older version that cannot confirm a mark",
                next_step="update the servers, or ask with `confirmed=False`",
            )
        return mark

    async def find_time(self, partition: int, time: int) -> Position:
        request = wire.FindTimeRequest(cluster_key=await self._known_key(), partition=partition, time=time)
        return await self._ask(calls.FIND_TIME, request)

    async def history(
        self,
        partition: int,
        lock: int,
        *,
        after: int,
        before: int | None,
        limit: int,
        newest_first: bool,
        confirmed: bool,
    ) -> HistoryPart:
        request = wire.HistoryRequest(
            cluster_key=await self._known_key(), partition=partition, lock=lock, after=after, before=before, limit=limit,
            newest_first=newest_first, confirmed=confirmed,
        )  # fmt: skip
        return await self._ask(calls.HISTORY, request)

    async def fetch_marked(
        self, partition: int, query: MarkedQuery, *, confirmed: bool, reach: int = EMPTY, since: Position | None = None
    ) -> MarkedPage:
        request = wire.FetchMarkedRequest(
            cluster_key=await self._known_key(),
            partition=partition,
            locks=[lock for group in query.groups for lock in group],
            group_sizes=[len(group) for group in query.groups],
            after=query.first_id - 1,
            before=query.last_id + 1 if query.last_id < ID_MAX else None,
            limit=query.limit,
            newest_first=query.newest_first,
            confirmed=confirmed,
            reach=reach,
        )
        if since is not None:
            request.position, request.timeline = since, since.timeline.bytes
        return await self._ask(calls.FETCH_MARKED, request)

    async def fetch(
        self,
        partition: int,
        first_id: int,
        last_id: int | None = None,
        *,
        with_locks: bool = False,
        timeline: UUID | None = None,
    ) -> AsyncGenerator[Run, None]:
        """Yield committed records, each id once and in order."""
        request = wire.FetchRecordsRequest(
            cluster_key=await self._known_key(),
            partition=partition,
            first_id=first_id,
            last_id=last_id,
            with_locks=with_locks,
            timeline=None if timeline is None else timeline.bytes,
        )
        next_id = first_id
        async with aclosing(self._each(calls.FETCH, request)) as runs:
            async for run in runs:
                if run.first_id != next_id or len(run) == 0:
                    raise BadFrame(f"record {next_id} from {self.address} was damaged on the way")
                next_id = run.last_id + 1
                yield run
        if last_id is not None and next_id != last_id + 1:
            raise BadFrame(f"{self.address} stopped before id {next_id}; ids up to {last_id} were requested")

    async def _known_key(self) -> bytes:
        return (self._key or (await self.locate()).cluster_key).bytes


class ServerClient(Caller, Servers):
    """One server over gRPC; its mounts and some calls use the port for streams where possible."""

    peer = Role.SERVER

    def __init__(
        self, address: str, key: UUID | None = None, *, seconds: float = CALL_SECONDS, tls: Tls | None = None
    ) -> None:
        """Use the cluster of our own certificate if `key` is None and there is `tls`."""
        Caller.__init__(self, address, seconds=seconds, tls=tls)
        Servers.__init__(self, tls.identity.key if key is None and tls is not None else key)
        self._tls = tls
        self._streams = ""
        self._streams_failed = ""
        """Address where frames failed and gRPC was used instead; empty if there is none."""
        self._no_calls = ""
        """Address whose frames carry no calls, such as that of an older server; empty if there is none."""
        self._carried_calls = ""
        """Address whose frames have carried calls. It is tried again after each loss: its server may have started anew."""
        self._framed: FramedCalls | None = None
        self._beginning = asyncio.Lock()
        self._is_closed = False
        self._connections: dict[Connection, None] = {}
        self._has_answered = False

    def expect(self, name: str | None, streams: str = "") -> None:
        self._channel.name = name
        self._streams = streams

    async def _ask(self, call: Call[R], request: Any, seconds: float | None = None) -> R:
        if call in FRAMED_CALLS and (framed := await self._framed_calls()) is not None and framed.takes(call):
            reply = await framed.ask(call, request, self._seconds if seconds is None else seconds)
            return call.unpack(reply, request, self.address)
        asked = super()._ask(call, request, seconds)
        return await (asked if self._has_answered or call is not calls.LOCATE else self._first(asked))

    async def _first(self, call: Coroutine[Any, Any, T]) -> T:
        """Await the first answer from an address. If there is none, find out whether another program is there, and
        raise that."""
        calling = asyncio.ensure_future(call)
        try:
            await asyncio.wait((calling,), timeout=STRANGE_SECONDS)
            if not calling.done() and (stranger := await stranger_at(self.address, self._tls)) is not None:
                raise stranger
            found = await calling
        except WrongPeer as error:
            if not isinstance(error.__cause__, grpc.aio.AioRpcError):
                raise
            raise await port_behind(self._channel, self.address) from error
        except TlsMismatch:
            raise
        except CannotConnect as error:
            stranger = await stranger_at(self.address, self._tls)
            if stranger is None:
                raise
            raise stranger from error
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
        self._has_answered = True
        return found

    def mount(self) -> MountPort:
        """Return a mount over frames, or over gRPC if the server offers no frames or they did not get through before."""
        by_grpc = MountStream(lambda: self._begin(calls.MOUNT), self.address)
        if not self._streams or self._streams == self._streams_failed:
            return by_grpc
        return FramedMount(self._streams, self._connect_frames, by_grpc, self._no_frames)

    async def _framed_calls(self) -> FramedCalls | None:
        """Return the connection for calls over frames; None if the server offers none, or it cannot be made."""
        if self._framed is not None and not self._framed.is_lost:
            return self._framed
        if self._is_closed:
            raise CannotConnect("the client was closed")
        if not self._streams or self._streams in (self._streams_failed, self._no_calls):
            return None
        async with self._beginning:
            if self._framed is None or (self._framed.is_lost and not self._is_closed):
                self._framed, streams = None, self._streams
                try:
                    connection = await self._connect_frames()
                    try:
                        async with asyncio.timeout(FRAMES_SECONDS):
                            self._framed = await FramedCalls.begin(connection, streams)
                        self._carried_calls = streams
                    finally:
                        if self._framed is None:
                            connection.lose(CannotConnect("it carries no calls"))
                except (TimeoutError, CannotConnect, BadFrame) as error:
                    if isinstance(error, WrongPeer | BadFrame) or streams != self._carried_calls:
                        self._no_calls = streams
                    _log.debug("calls to %s go through gRPC: %s", self.address, error)
            return self._framed

    async def _connect_frames(self) -> Connection:
        connection: Connection | None = None
        there = address_of_peer(self._streams)
        try:
            async with asyncio.timeout(FRAMES_SECONDS):
                connection = await connect(
                    there.host,
                    there.port,
                    role=Role.SERVER,
                    name=self._channel.name,
                    tls=self._tls,
                    bytes_max=MESSAGE_BYTES_MAX,
                    quiet_seconds=QUIET_SECONDS,
                    tells_when_full=True,
                )
                self._connections = {one: None for one in self._connections if not one.is_lost}
                self._connections[connection] = None
                await connection.answered()
                return connection
        except TimeoutError:
            late = CannotConnect(f"{self._streams} did not answer within {FRAMES_SECONDS:g} seconds")
            if connection is not None:
                connection.lose(late)
            raise late from None

    async def close(self) -> None:
        """Close the client and its mounts."""
        self._is_closed = True
        if self._framed is not None:
            await self._framed.close()
        for connection in self._connections:
            connection.lose(CannotConnect("the client was closed"))
        await self._channel.close(orderly=True)

    def _no_frames(self, streams: str, error: WaltzError) -> None:
        """Remember and log that gRPC got through where frames did not."""
        if self._streams_failed != streams:
            self._streams_failed = streams
            _log.warning(
                "the server at %s is used through gRPC, which is slower: %s. Next: let applications reach %s, or set "
                "stream_port of the server to a port that they reach, or to -1",
                self.address,
                error.message,
                streams,
            )

    def attend(self) -> AttendPort:
        return GrpcStream(
            lambda: self._begin(calls.ATTEND),
            self.address,
            "the stream of a member",
            pack=member_message,
            unpack=delivery_frames,
            ending=lambda frame: frame.error if isinstance(frame, Dismissed) else None,
        )

    async def _begin(self, call: Call[Any]) -> Any:
        await self._channel.prove(self._seconds)
        return self._channel.stream_stream(call.path, call.request.SerializeToString, parsed(call.reply))()

    async def _each(self, call: Call[R], request: Any) -> AsyncGenerator[R, None]:
        """Make a call that is answered by a stream, with a deadline for each next message."""
        async with aclosing(super()._each(call, request)) as values:
            while True:
                try:
                    async with asyncio.timeout(self._seconds):
                        value = await anext(values)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise CannotConnect(f"{self.address} sent nothing for {self._seconds:.0f} seconds") from None
                yield value


FRAMES_SECONDS = 1.0
"""Seconds that frames may take to get through before gRPC is tried."""
QUIET_SECONDS = 10.0
"""Seconds of silence after which a heartbeat is requested, as with gRPC."""


class FramedMount:
    """The client's end of a mount on a plain connection, or over gRPC if that cannot be made."""

    def __init__(
        self,
        address: str,
        connect: Callable[[], Awaitable[Connection]],
        by_grpc: MountStream,
        on_grpc: Callable[[str, WaltzError], None],
    ) -> None:
        """Prepare a mount. `on_grpc` is called once gRPC was used and got through."""
        self._address = address
        self._connect = connect
        self._by_grpc = by_grpc
        self._on_grpc = on_grpc
        self._connection: Connection | None = None
        self._next = Kind.MOUNT
        self._takes_singles = False
        """Whether the server takes frames of the kind SINGLE, as it said in `Mounted`."""
        self._why_grpc: WaltzError | None = None
        self._is_told = False
        self._over: WaltzError | None = None

    async def send(self, frames: Sequence[ClientFrame]) -> None:
        if self._over is not None:
            raise self._over
        await self._begin()
        if self._connection is None:
            await self._by_grpc.send(frames)
        else:
            await self._connection.send(*self._packed(frames))

    @property
    def may_post(self) -> bool:
        return self._over is None and self._connection is not None and self._connection.may_post

    def post(self, frames: Sequence[ClientFrame]) -> None:
        """Send frames without waiting; `send` was called before."""
        assert self._connection is not None
        self._connection.post(*self._packed(frames))

    def _packed(self, frames: Sequence[ClientFrame]) -> tuple[Kind, Sequence[Buffer]]:
        """Return the kind and the parts of the next frame."""
        kind, self._next = self._next, Kind.CLIENT
        one = frames[0]
        if (
            self._takes_singles
            and isinstance(one, SingleAppend)
            and len(frames) == 1
            and len(one.locks) <= SINGLE_LOCKS_MAX
        ):
            return Kind.SINGLE, packed_single(one)
        return kind, (packed_client_frames(frames),)

    def hear(self, taker: Callable[[Sequence[ServerFrame]], None]) -> None:
        if self._connection is not None:
            self._connection.hear(Kind.SERVER, lambda content: taker(self._taken(content)))
            self._connection.hear(Kind.COMMITTED, lambda content: taker(self._committed(content)))

    async def _begin(self) -> None:
        if self._connection is not None or self._why_grpc is not None:
            return
        try:
            self._connection = await self._connect()
        except CannotConnect as error:
            self._why_grpc = error
        if self._over is not None:
            self.cancel()
            raise self._over

    async def receive(self) -> Sequence[ServerFrame] | None:
        if self._over is not None:
            return None
        await self._begin()
        if self._why_grpc is not None:
            found = await self._by_grpc.receive()
            if found is not None and not self._is_told:
                self._is_told = True
                self._on_grpc(self._address, self._why_grpc)
            return found
        assert self._connection is not None
        match await self._connection.receive():
            case None:
                raise self._end(CannotConnect(f"{self._address} closed the mount"))
            case Kind.SERVER, content:
                return self._taken(content)
            case Kind.COMMITTED, content:
                return self._committed(content)
            case Kind.REFUSED, content:
                raise self._end(unpacked_error(content))
            case kind, _:
                raise self._end(CannotConnect(f"{self._address} sent a frame of the kind {kind.name} in a mount"))

    def _taken(self, content: Buffer) -> Sequence[ServerFrame]:
        try:
            frames = unpacked_server_frames(content)
        except WaltzError as error:
            raise self._end(error) from None
        first, last = frames[0], frames[-1]
        if isinstance(first, Mounted):
            self._takes_singles = first.takes_singles
        if isinstance(last, Refused):
            self._end(last.error)
        return frames

    def _committed(self, content: Buffer) -> Sequence[ServerFrame]:
        try:
            return (unpacked_committed(content),)
        except WaltzError as error:
            raise self._end(error) from None

    def _end(self, error: WaltzError) -> WaltzError:
        self._over = error
        self.cancel()
        return error

    def cancel(self) -> None:
        if self._over is None:
            self._over = CannotConnect(f"the mount at {self._address} was cancelled here")
        self._by_grpc.cancel()
        if self._connection is not None:
            self._connection.lose(self._over)


WRITE_FAILED = "Internal error from Core"
"""Details of the status that gRPC makes up when a write fails."""
STATUS_SECONDS = 1.0
"""Seconds to wait for the status of a server that has ended a stream."""


def _done(work: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine gives that has nothing to wait for."""
    try:
        work.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("it waits")


class GrpcStream(Generic[Sent, Received]):
    """The caller's end of a bidirectional stream of frames. It has no deadlines, because only the client knows how long
    to wait."""

    def __init__(
        self,
        begin: Callable[[], Awaitable[Any]],
        address: str,
        what: str,
        *,
        pack: Callable[[Sequence[Sent]], Any],
        unpack: Callable[[Any], Sequence[Received]],
        ending: Callable[[Received], WaltzError | None],
    ) -> None:
        """Prepare a stream. `ending` returns the error in a frame if that frame is the last one."""
        self._begin = begin
        self._call: Any = None
        """Call of gRPC. It begins on first use, after the other side's certificate was checked."""
        self._address = address
        self._what = what
        self._pack = pack
        self._unpack = unpack
        self._ending = ending
        self._over: WaltzError | None = None
        """Error that ended the stream at this end; None while it is open."""
        self._status: asyncio.Future[grpc.aio.AioRpcError] = asyncio.get_running_loop().create_future()
        """Status with which the server ended the stream."""

    async def send(self, frames: Sequence[Sent]) -> None:
        """Send frames; wait while the connection is full."""
        if self._over is not None:
            raise self._over
        await self._started()
        try:
            await self._ours(self._call.write(self._pack(frames)))
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:  # the server has ended the stream
            lost = CannotConnect(f"{self._what} at {self._address} has ended")
            raise await self._reason(lost) from error

    async def _started(self) -> None:
        if self._call is None:
            self._call = await self._begin()
            self._call.add_done_callback(self._note_status)
            if self._over is not None:
                self._call.cancel()
                raise self._over

    async def receive(self) -> Sequence[Received] | None:
        """Return the next frames; None at the end of the stream."""
        if self._over is not None:
            return None
        await self._started()
        message = await self._ours(self._call.read())
        if message is grpc.aio.EOF:
            return None
        try:
            frames = self._unpack(checked(message))
        except WaltzError as error:
            self._over = error
            self._call.cancel()
            raise
        last = self._ending(frames[-1]) if frames else None
        if last is not None:
            self._over = last
            self._call.cancel()
        return frames

    def cancel(self) -> None:
        if self._over is None:
            self._over = CannotConnect(f"{self._what} at {self._address} was cancelled here")
        if self._call is not None:
            self._call.cancel()

    async def _ours(self, work: Awaitable[T]) -> T:
        """Await an operation of gRPC. gRPC reports a cancelled call as a cancelled task; only a cancellation of this
        task is passed on."""
        try:
            return await work
        except grpc.aio.AioRpcError as error:
            failed = error_of(error)
            raise (await self._reason(failed) if error.details() == WRITE_FAILED else failed) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._over is None or (task is not None and task.cancelling()):
                raise
            raise self._over from None

    def _note_status(self, call: Any) -> None:
        """Keep the server's status. gRPC calls this whenever it sets one, and sets one of its own if a write fails because
        the server has ended the stream, before or after it sets the server's (grpc/grpc issue 36066)."""
        metadata = (_done(call.initial_metadata()), _done(call.trailing_metadata()))
        status = grpc.aio.AioRpcError(_done(call.code()), *metadata, _done(call.details()))
        if status.details() != WRITE_FAILED and not self._status.done():
            self._status.set_result(status)

    async def _reason(self, otherwise: WaltzError) -> WaltzError:
        """Return the error with which the server ended the stream, or another one if gRPC gives no status of it."""
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                return error_of(await asyncio.shield(self._status))
        except TimeoutError:
            return otherwise


class MountStream(GrpcStream[ClientFrame, ServerFrame]):
    """The client's end of a mount over gRPC."""

    def __init__(self, begin: Callable[[], Awaitable[Any]], address: str) -> None:
        super().__init__(
            begin,
            address,
            "the mount",
            pack=client_message,
            unpack=server_frames,
            ending=lambda frame: frame.error if isinstance(frame, Refused) else None,
        )

    @property
    def may_post(self) -> bool:
        return False

    def post(self, frames: Sequence[ClientFrame]) -> None:
        raise AssertionError("gRPC takes nothing without waiting")

    def hear(self, taker: Callable[[Sequence[ServerFrame]], None]) -> None:
        """Ignore the taker: all frames are received."""


ADMIN_SECONDS = 30.0


class ServerAdminClient(Caller):
    peer = Role.SERVER

    def __init__(
        self, address: str, key: UUID, *, seconds: float = ADMIN_SECONDS, tls: Tls | None = None, name: str | None = None
    ) -> None:
        super().__init__(address, seconds=seconds, tls=tls, name=name)
        self._key = key.bytes

    async def describe(self) -> ServerDescription:
        """Describe the server; it may belong to another cluster."""
        return await self._ask(calls.DESCRIBE_SERVER, wire.DescribeServerRequest())

    async def drain(self, is_draining: bool) -> Sequence[int]:
        """Give all partitions away and take no new ones, or take part again. Return the partitions that the server owns
        now."""
        return await self._ask(calls.DRAIN, wire.DrainRequest(cluster_key=self._key, draining=is_draining))

    async def events(self, after: int = 0) -> Events:
        """Return the events logged after a number."""
        return await self._ask(calls.SERVER_EVENTS, wire.EventsRequest(after=after))

    async def clients(self) -> ClientList:
        """Return which applications are or were lately connected."""
        return await self._ask(calls.LIST_CLIENTS, wire.ListClientsRequest())

    async def disconnect(self, name: str, instance: str | None = None) -> int:
        """End the mounts of a name, or of one of its instances; return how many there were."""
        request = wire.DisconnectRequest(cluster_key=self._key, name=name, instance=instance)
        return await self._ask(calls.DISCONNECT_CLIENT, request)

    async def explain_lock(self, partition: int, lock: int) -> LockExplanation:
        """Return the state of a lock, given by its 64 bits. Only the owner of the partition can answer."""
        request = wire.ExplainLockRequest(cluster_key=self._key, partition=partition, lock=lock)
        return await self._ask(calls.EXPLAIN_LOCK, request)

    async def groups(self, name: str | None = None) -> GroupList:
        """Return the consumer groups as this server knows them, or the group `name`."""
        return await self._ask(calls.LIST_GROUPS, wire.ListGroupsRequest(name=name))

    async def parked(self, name: str, partition: int | None = None, *, after: int = -1, count: int = 1000) -> ParkedList:
        """Return parked transactions of a group. With a partition, `after` selects ids above it."""
        request = wire.ListParkedRequest(name=name, partition=partition, after=after, count=count)
        return await self._ask(calls.LIST_PARKED, request)

    async def set_group(self, meta: GroupMeta, made_at: int) -> MadeGroup:
        """Change the settings of a group."""
        request = wire.SetGroupRequest(cluster_key=self._key, meta=to_message(wire.GroupMeta, meta), made_at=made_at)
        return await self._ask(calls.SET_GROUP, request)

    async def remove_group(self, name: str, made_at: int) -> None:
        request = wire.RemoveGroupRequest(cluster_key=self._key, name=name, made_at=made_at)
        await self._ask(calls.REMOVE_GROUP, request)

    async def pass_entry(self, id: int) -> None:
        """Have the groups continue without an entry of the group log that cannot be read."""
        await self._ask(calls.PASS_ENTRY, wire.PassEntryRequest(cluster_key=self._key, id=id))

    async def change_group(
        self, name: str, made_at: int, partition: int, change: Change, ids: Sequence[int], epoch: int = 0
    ) -> Changed:
        """Change a group in a partition that this server owns. `ids` are the parked transactions; an empty sequence
        means all of them. A skip and a reset take the one id to move to. `epoch` is that which a reset begins
        (`reset_epoch`); with 0, a reset that is repeated is done twice."""
        request = wire.ChangeGroupRequest(
            cluster_key=self._key, name=name, made_at=made_at, partition=partition, change=change, ids=ids, epoch=epoch
        )
        return await self._ask(calls.CHANGE_GROUP, request)
