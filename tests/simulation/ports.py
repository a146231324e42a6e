"""Storages and servers as others see them through the simulated network. Nothing is decided here: calls become streams."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar
from uuid import UUID

from tests.simulation.loop import Life
from tests.simulation.network import End, Network, Stream
from waltzd.disk.seam import Buffer
from waltzd.errors import CannotConnect, WaltzError
from waltzd.format.key_index import LockMarks, LockQuery
from waltzd.protocol.batches import ClientFrame, ServerFrame, SingleAppend, SingleCommittal
from waltzd.protocol.descriptions import ReplicaStatus, RestoreOrder, Restoring, ServerDescription, StorageDescription
from waltzd.protocol.groups import DeliveryFrame, MemberFrame
from waltzd.protocol.peers import Content, RecordsFrame
from waltzd.protocol.role import Identity
from waltzd.server.clients.calls import ServerCalls
from waltzd.server.clients.service import LogService
from waltzd.server.session.change_signal import ChangeSignal
from waltzd.storage.calls import StorageCalls
from waltzd.storage.service import ReplicaService
from waltzd.testing.cluster import LocalServer
from waltzd.wire.calls import OPEN, Call, Transport
from waltzd.wire.codec import (
    packed_client_frames,
    packed_committed,
    packed_server_frames,
    packed_single,
    unpacked_client_frames,
    unpacked_committed,
    unpacked_server_frames,
    unpacked_single,
)
from waltzd.wire.servers import Servers
from waltzd.wire.servicer import Host, Origin, answered
from waltzd.wire.storages import Replicas

R = TypeVar("R")
Up = TypeVar("Up")
Down = TypeVar("Down")
T = TypeVar("T")
H = TypeVar("H", StorageCalls, ServerCalls, LocalServer)
CALL_SECONDS = 10.0
_numbers = itertools.count(1)
Work: TypeAlias = Callable[[H, End], Coroutine[Any, Any, None]]
Find: TypeAlias = Callable[[Life], H | None]
"""Who answers for a life; None when nobody does any more."""


class _Done:
    """The caller has no more frames."""


_GO_ON = object()
"""A storage has agreed to take a file."""


class _Port(Transport, Generic[H]):
    """Nothing but a stream of the network: one for each call."""

    def __init__(
        self,
        network: Network,
        caller: Life,
        name: str,
        find: Find[H],
        *,
        seconds: float,
        lingers: bool = False,
        identity: str = "",
    ) -> None:
        """`lingers`: what was begun there goes on, also when the caller has given up or the connection is gone. `identity`:
        what the caller's certificate says."""
        self.name = name
        self._network = network
        self._caller = caller
        self._find: Find[H] = find
        self._seconds = seconds
        self._lingers = lingers
        self._origin = Origin(Identity.among([identity]))

    def _open(self, work: Work[H]) -> Stream:
        async def serve(host: H, stream: Stream) -> None:
            await work(host, stream.called)

        def find(life: Life) -> Callable[[Stream], Coroutine[Any, Any, None]] | None:
            host = self._find(life)
            return None if host is None else partial(serve, host)

        return self._network.connection(self._caller, self.name).open(find, lingers=self._lingers)

    def _service(self, host: H) -> Host:
        """The service that stands in front of a host."""
        raise AssertionError("this host has none")

    async def _timely(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        try:
            async with asyncio.timeout(seconds or self._seconds):
                return await work
        except TimeoutError:
            raise CannotConnect(f"{self.name} did not answer within {seconds or self._seconds:g} seconds") from None

    async def _answer(self, answer: Callable[[H], Coroutine[Any, Any, T]], seconds: float | None = None) -> T:
        async def work(host: H, end: End) -> None:
            await end.send((await answer(host),))

        stream = self._open(work)
        try:
            found: tuple[T] | None = await self._timely(stream.caller.receive(), seconds)
        finally:
            stream.cancel()
        if found is None:
            raise CannotConnect(f"{self.name} ended a call without a word")
        return found[0]

    async def _answers(self, work: Work[H]) -> AsyncGenerator[Any, None]:
        stream = self._open(work)
        try:
            while (found := await self._timely(stream.caller.receive())) is not None:
                yield found
        finally:
            stream.cancel()

    async def _ask(self, call: Call[R], request: Any, seconds: float | None = None) -> R:
        """Only opening a replica may take longer: what is long with a real disk or store takes no time here."""
        return await self._answer(
            lambda host: answered(self._service(host), call, request, self._origin), seconds if call is OPEN else None
        )

    async def _each(self, call: Call[R], request: Any) -> AsyncGenerator[R, None]:
        async def work(host: H, end: End) -> None:
            async with aclosing(answered(self._service(host), call, request, self._origin)) as values:
                async for value in values:
                    await end.send(value)

        async with aclosing(self._answers(work)) as values:
            async for value in values:
                yield value


# -- a storage ---------------------------------------------------------------------------------------------------------


class SimReplicaPort(_Port[StorageCalls], Replicas):
    def __init__(
        self,
        network: Network,
        caller: Life,
        name: str,
        find: Find[StorageCalls],
        *,
        key: UUID,
        owner_key: bytes,
        seconds: float = CALL_SECONDS,
        lingers: bool = False,
        late: Callable[[], float] = lambda: 0.0,
        check_version: Callable[[str], None] = lambda version: None,
        acknowledged: Callable[[], None] = lambda: None,
        clock: Callable[[], int] = lambda: 0,
    ) -> None:
        """`late`: by how many seconds the next answer about a lock is late. `acknowledged` is called in the life of the
        storage before each acknowledgement. `clock`: what the storage shows, in microseconds; 0 for nothing."""
        _Port.__init__(self, network, caller, name, find, seconds=seconds, lingers=lingers)
        Replicas.__init__(self, key, owner_key, number=next(_numbers), check_version=check_version)
        self._late = late
        self._acknowledged = acknowledged
        self._clock = clock

    def _service(self, host: StorageCalls) -> Host:
        return ReplicaService(host, clock=self._clock)

    async def find_marks(self, partition: int, query: LockQuery, *, session: int) -> LockMarks:
        found = await super().find_marks(partition, query, session=session)
        if seconds := self._late():
            await asyncio.sleep(seconds)
        return found

    def append(self, partition: int, session: int) -> SimAppend:
        contact = self._contact(partition, session)

        async def work(calls: StorageCalls, end: End) -> None:
            calls.check_key(self._key)
            await calls.append(partition, session, _StorageLink(end, self._acknowledged), contact=contact)

        return SimAppend(lambda: self._open(work), f"the append stream to {self.name}")

    async def fetch_segment(self, partition: int, first_id: int, *, session: int) -> AsyncIterator[Buffer]:
        contact = self._contact(partition, session)

        async def work(calls: StorageCalls, end: End) -> None:
            calls.check_key(self._key)
            async with aclosing(calls.fetch_segment(partition, session, first_id, contact=contact)) as pieces:
                async for piece in pieces:
                    await end.send(piece)

        async with aclosing(self._answers(work)) as pieces:
            async for data in pieces:
                yield data

    async def install_segment(
        self, partition: int, session: int, first_id: int, file_bytes: int, pieces: AsyncIterator[Buffer]
    ) -> ReplicaStatus:
        contact = self._contact(partition, session)

        async def work(calls: StorageCalls, end: End) -> None:
            async def arriving() -> AsyncIterator[Buffer]:
                await end.send(_GO_ON)
                while not isinstance(found := await end.receive(), _Done):
                    if found is None:
                        raise CannotConnect("the caller has gone")
                    yield found

            calls.check_key(self._key)
            status = await calls.install_segment(partition, session, first_id, file_bytes, arriving(), contact=contact)
            await end.send((status,))

        stream = self._open(work)
        try:
            answer: Any = await self._timely(stream.caller.receive())
            if answer is _GO_ON:
                await self._send_file(stream, pieces)
                answer = await self._timely(stream.caller.receive())
        finally:
            stream.cancel()
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()
        if answer is None:
            raise CannotConnect(f"{self.name} ended an installation without a word")
        status: ReplicaStatus = answer[0]
        return status

    async def _send_file(self, stream: Stream, pieces: AsyncIterator[Buffer]) -> None:
        async for piece in pieces:
            if stream.caller.is_over:  # it has answered already
                return
            await self._timely(stream.caller.send(piece))
        if not stream.caller.is_over:
            await self._timely(stream.caller.send(_Done()))

    async def close(self) -> None:
        return None


class _Lazy:
    """A stream that begins with the first thing that is said."""

    def __init__(self, begin: Callable[[], Stream], what: str) -> None:
        self._begin = begin
        self._what = what
        self._stream: Stream | None = None
        self._begun = ChangeSignal()
        self._is_given_up = False

    def caller(self) -> End:
        if self._is_given_up:
            raise CannotConnect(f"{self._what} was given up here")
        if self._stream is None:
            self._stream = self._begin()
            self._begun.notify()
        return self._stream.caller

    async def receive(self) -> Any:
        while self._stream is None:
            if self._is_given_up:
                raise CannotConnect(f"{self._what} was given up here")
            await self._begun.wait(self._begun.version)
        return await self._stream.caller.receive()

    def cancel(self) -> None:
        self._is_given_up = True
        self._begun.notify()
        if self._stream is not None:
            self._stream.cancel()


class SimAppend(_Lazy):
    """One append stream, as the server holds it."""

    async def start(self) -> None:
        self.caller()

    async def send(self, content: Content, committed: int) -> None:
        await self.caller().send(RecordsFrame(content, committed))

    @property
    def may_post(self) -> bool:
        return not self._is_given_up and self.caller().may_post

    def post(self, content: Content, committed: int) -> None:
        self.caller().post(RecordsFrame(content, committed))

    def hear(self, taker: Callable[[int], None]) -> None:
        self.caller().hear(taker)


class _StorageLink:
    def __init__(self, end: End, acknowledged: Callable[[], None]) -> None:
        self._end = end
        self._acknowledged = acknowledged

    async def receive(self) -> RecordsFrame | None:
        frame: RecordsFrame | None = await self._end.receive()
        return frame

    def hear(self, taker: Callable[[RecordsFrame], bool]) -> None:
        self._end.hear(taker)

    async def send(self, durable_id: int) -> None:
        self._acknowledged()
        await self._end.send(durable_id)

    @property
    def may_post(self) -> bool:
        return False  # nothing arrives at once

    def post(self, durable_id: int) -> None:
        raise AssertionError("it may not")

    async def refuse(self, error: WaltzError) -> None:
        self._end.finish(error)


class SimAdminPort(_Port[StorageCalls]):
    async def describe(self) -> StorageDescription:
        return await self._answer(lambda calls: calls.describe())

    async def fence(self, partition: int, session: int) -> ReplicaStatus:
        return await self._answer(lambda calls: calls.fence(partition, session))

    async def restore(self, order: RestoreOrder) -> AsyncGenerator[Restoring, None]:
        async def work(calls: StorageCalls, end: End) -> None:
            async with aclosing(calls.restorer.restore(order)) as states:
                async for state in states:
                    await end.send(state)
            await end.send(None)

        async with aclosing(self._answers(work)) as found:
            async for state in found:
                yield state

    async def remove_partitions(self, numbers: Sequence[int], *, delete_files: bool) -> dict[int, WaltzError | None]:
        async def answer(calls: StorageCalls) -> dict[int, WaltzError | None]:
            results: dict[int, WaltzError | None] = {}
            for number in numbers:
                try:
                    await calls.remove_partition(number, delete_files=delete_files)
                    results[number] = None
                except WaltzError as error:
                    results[number] = error
            return results

        return await self._answer(answer)


# -- a server ----------------------------------------------------------------------------------------------------------


class SimServerAdminPort(_Port[LocalServer]):
    async def describe(self) -> ServerDescription:
        async def answer(server: LocalServer) -> ServerDescription:
            return ServerDescription(
                name=server.name,
                cluster_key=server.owner.meta.key,
                instance=server.meta.instance,
                version=server.meta.version,
                uptime_ms=0,
                is_connected=True,
                is_draining=False,
                is_leader=False,
                partitions=server.owner.describe(),
                keeps_group_log=True,
            )

        return await self._answer(answer)


class SimServerPort(_Port[ServerCalls], Servers):
    def __init__(
        self,
        network: Network,
        caller: Life,
        name: str,
        find: Find[ServerCalls],
        key: UUID | None,
        *,
        seconds: float = CALL_SECONDS,
        identity: str = "",
        takes_singles: Callable[[], bool] = lambda: False,
    ) -> None:
        """`takes_singles` is asked in the life of the server: whether it takes single transactions without columns."""
        _Port.__init__(self, network, caller, name, find, seconds=seconds, identity=identity)
        Servers.__init__(self, key)
        self.address = name
        self._takes_singles = takes_singles

    def _service(self, host: ServerCalls) -> Host:
        return LogService(host)

    def expect(self, name: str | None, streams: str = "") -> None:
        pass

    def mount(self) -> SimStream[ClientFrame, ServerFrame]:
        async def serve(calls: ServerCalls, end: End) -> None:
            kind = _SinglesLink if self._takes_singles() else _ColumnsLink
            await calls.mount(kind(end, self._origin.uri))

        return self._stream(serve, f"the mount at {self.name}")

    def attend(self) -> SimStream[MemberFrame, DeliveryFrame]:
        what = f"the stream of a member at {self.name}"
        return self._stream(lambda calls, end: calls.attend(_Link(end, self._origin.uri)), what)

    def _stream(self, serve: Work[ServerCalls], what: str) -> SimStream[Any, Any]:
        async def work(calls: ServerCalls, end: End) -> None:
            try:
                await serve(calls, end)
            except WaltzError:
                return  # the caller was told in the stream

        return SimStream(lambda: self._open(work), what)

    async def close(self) -> None:
        return None


class SimStream(_Lazy, Generic[Up, Down]):
    """A mount, or the stream of a member of a consumer group, as the client holds it."""

    async def send(self, frames: Sequence[Up]) -> None:
        await self.caller().send(list(frames))

    @property
    def may_post(self) -> bool:
        return not self._is_given_up and self.caller().may_post

    def post(self, frames: Sequence[Up]) -> None:
        self.caller().post(list(frames))

    def hear(self, taker: Callable[[Sequence[Down]], None]) -> None:
        self.caller().hear(taker)


class _Link(Generic[Up, Down]):
    """The server's end of it."""

    quiet_seconds = None

    def __init__(self, end: End, identity: str) -> None:
        self.peer = end.other.life.name
        self.identity = identity
        self._end = end

    async def receive(self) -> Sequence[Up] | None:
        frames: Sequence[Up] | None = await self._end.receive()
        return frames

    async def send(self, frames: Sequence[Down]) -> None:
        await self._end.send(list(frames))

    @property
    def may_post(self) -> bool:
        return self._end.may_post

    def post(self, frames: Sequence[Down]) -> None:
        self._end.post(list(frames))


class _ColumnsLink(_Link[ClientFrame, ServerFrame]):
    """The server's end of a mount in which nothing travels without columns."""

    takes_singles = False

    async def receive(self) -> Sequence[ClientFrame] | None:
        frames = await super().receive()
        return None if frames is None else [_as_columns(frame) for frame in frames]

    def hear_singles(self, taker: Callable[[SingleAppend], bool]) -> None:
        """Ignore the taker: all frames are received."""

    async def send(self, frames: Sequence[ServerFrame]) -> None:
        await super().send([_in_columns(frame) for frame in frames])

    def post(self, frames: Sequence[ServerFrame]) -> None:
        super().post([_in_columns(frame) for frame in frames])


def _as_columns(frame: ClientFrame) -> ClientFrame:
    return unpacked_client_frames(packed_client_frames([frame]))[0] if isinstance(frame, SingleAppend) else frame


def _in_columns(frame: ServerFrame) -> ServerFrame:
    return unpacked_server_frames(packed_server_frames([frame]))[0] if isinstance(frame, SingleCommittal) else frame


class _SinglesLink(_Link[ClientFrame, ServerFrame]):
    """The server's end of a mount in which a transaction that travels alone, and its outcome, are plain numbers."""

    takes_singles = True

    def hear_singles(self, taker: Callable[[SingleAppend], bool]) -> None:
        def take(frames: Sequence[ClientFrame]) -> bool:
            one = frames[0]
            return (
                len(frames) == 1 and isinstance(one, SingleAppend) and taker(unpacked_single(b"".join(packed_single(one))))
            )

        self._end.hear(take)

    async def send(self, frames: Sequence[ServerFrame]) -> None:
        await super().send(_as_numbers(frames))

    def post(self, frames: Sequence[ServerFrame]) -> None:
        super().post(_as_numbers(frames))


def _as_numbers(frames: Sequence[ServerFrame]) -> Sequence[ServerFrame]:
    one = frames[0]
    return [unpacked_committed(packed_committed(one))] if len(frames) == 1 and isinstance(one, SingleCommittal) else frames
