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
from waltzd.cluster.groups import GroupMeta, MadeGroup
from waltzd.disk.seam import Buffer
from waltzd.errors import CannotConnect, ForeignCluster, WaltzError
from waltzd.format.batch import Piece
from waltzd.format.record import Run
from waltzd.protocol.batches import INTRODUCTION, ClientFrame, Introduction, Registration, ServerFrame, Topology
from waltzd.protocol.descriptions import (
    ArchiveCheck,
    Archived,
    BackedUp,
    ReplicaStatus,
    RestoreOrder,
    Restoring,
    ServerDescription,
    StorageDescription,
)
from waltzd.protocol.groups import DeliveryFrame, MemberFrame
from waltzd.protocol.peers import NOBODY, Contact, Content, LockHistory, RecordsFrame, secret_of
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import NEVER_FORKED, Lineage
from waltzd.server.clients.calls import ServerCalls
from waltzd.server.session.wake import Bell
from waltzd.storage.calls import StorageCalls
from waltzd.testing.server import LocalServer

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


class _Port(Generic[H]):
    def __init__(
        self, network: Network, caller: Life, name: str, find: Find[H], *, seconds: float, lingers: bool = False
    ) -> None:
        """`lingers`: what was begun there goes on, also when the caller has given up or the connection is gone."""
        self.name = name
        self._network = network
        self._caller = caller
        self._find: Find[H] = find
        self._seconds = seconds
        self._lingers = lingers

    def _open(self, work: Work[H]) -> Stream:
        async def serve(host: H, stream: Stream) -> None:
            self._check(host)
            await work(host, stream.called)

        def find(life: Life) -> Callable[[Stream], Coroutine[Any, Any, None]] | None:
            host = self._find(life)
            return None if host is None else partial(serve, host)

        return self._network.connection(self._caller, self.name).open(find, lingers=self._lingers)

    def _check(self, host: H) -> None:
        """Refuse a caller that means another cluster."""

    async def _timely(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        try:
            async with asyncio.timeout(seconds or self._seconds):
                return await work
        except TimeoutError:
            raise CannotConnect(f"{self.name} did not answer within {seconds or self._seconds:g} seconds") from None

    async def _ask(self, answer: Callable[[H], T | Coroutine[Any, Any, T]], seconds: float | None = None) -> T:
        async def work(host: H, end: End) -> None:
            found = answer(host)
            await end.send((await found if isinstance(found, Coroutine) else found,))

        stream = self._open(work)
        try:
            found: tuple[T] | None = await self._timely(stream.caller.receive(), seconds)
        finally:
            stream.cancel()
        if found is None:
            raise CannotConnect(f"{self.name} ended a call without a word")
        return found[0]

    async def _each(self, work: Work[H]) -> AsyncGenerator[Any, None]:
        stream = self._open(work)
        try:
            while (found := await self._timely(stream.caller.receive())) is not None:
                yield found
        finally:
            stream.cancel()


# -- a storage ---------------------------------------------------------------------------------------------------------


class SimReplicaPort(_Port[StorageCalls]):
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
    ) -> None:
        super().__init__(network, caller, name, find, seconds=seconds, lingers=lingers)
        self._key = key
        self._owner_key = owner_key
        self._number = next(_numbers)
        self._contacts: dict[int, int] = {}

    def _check(self, host: StorageCalls) -> None:
        host.check_key(self._key)

    def _contact(self, partition: int, session: int | None) -> Contact:
        """As `waltzd.wire.storages.ReplicaClient` does it."""
        if session is None:
            return NOBODY
        return Contact(self._contacts.get(partition, 0), secret_of(self._owner_key, partition, session))

    async def status(self, partition: int) -> ReplicaStatus:
        return await self._ask(lambda calls: calls.status(partition))

    async def quiet(self, partitions: Sequence[int]) -> Sequence[int]:
        return await self._ask(lambda calls: calls.quiet(partitions))

    async def open(
        self, partition: int, session: int, *, partitions: int, create: bool = False, seconds: float | None = None
    ) -> ReplicaStatus:
        secret = secret_of(self._owner_key, partition, session)
        status: ReplicaStatus = await self._ask(
            lambda calls: calls.open_session(
                partition, session, partitions, create=create, caller=self._number, secret=secret
            ),
            seconds,
        )
        self._contacts[partition] = status.contact
        return status

    async def set_low_mark(self, partition: int, session: int, mark: int) -> ReplicaStatus:
        contact = self._contact(partition, session)
        return await self._ask(lambda calls: calls.set_low_mark(partition, session, mark, contact=contact))

    async def truncate(self, partition: int, session: int, mark: int) -> ReplicaStatus:
        contact = self._contact(partition, session)
        return await self._ask(lambda calls: calls.truncate(partition, session, mark, contact=contact))

    async def fork(self, partition: int, session: int, lineage: Lineage) -> ReplicaStatus:
        contact = self._contact(partition, session)
        return await self._ask(lambda calls: calls.fork(partition, session, lineage, contact=contact))

    def append(self, partition: int, session: int) -> SimAppend:
        contact = self._contact(partition, session)

        async def work(calls: StorageCalls, end: End) -> None:
            await calls.append(partition, session, _StorageLink(end), contact=contact)

        return SimAppend(lambda: self._open(work), f"the append stream to {self.name}")

    async def read(
        self,
        partition: int,
        first_id: int,
        last_id: int | None = None,
        *,
        session: int | None = None,
        frame_bytes: int = 0,
        with_locks: bool = False,
    ) -> AsyncIterator[Run]:
        contact = self._contact(partition, session)

        async def work(calls: StorageCalls, end: End) -> None:
            runs = calls.read(partition, session, first_id, last_id, frame_bytes, contact=contact, with_locks=with_locks)
            async with aclosing(runs):
                async for run in runs:
                    await end.send(run)

        async with aclosing(self._each(work)) as runs:
            async for run in runs:
                yield run

    async def read_whole(
        self, partition: int, first_id: int, last_id: int, *, session: int, frame_bytes: int = 0
    ) -> AsyncIterator[Piece]:
        contact = self._contact(partition, session)

        async def work(calls: StorageCalls, end: End) -> None:
            whole = calls.read_whole(partition, session, first_id, last_id, frame_bytes, contact=contact)
            async with aclosing(whole):
                async for content in whole:
                    await end.send(content)

        async with aclosing(self._each(work)) as contents:
            async for content in contents:
                for piece in (content,) if isinstance(content, Run) else content:
                    yield piece

    async def read_locks(self, partition: int, last_id: int, *, session: int, bytes_max: int) -> LockHistory | None:
        contact = self._contact(partition, session)
        return await self._ask(lambda calls: calls.read_locks(partition, session, last_id, bytes_max, contact=contact))

    async def find_time(self, partition: int, time: int, *, session: int) -> int:
        contact = self._contact(partition, session)
        return await self._ask(lambda calls: calls.find_time(partition, session, time, contact=contact))

    async def archive(self, partition: int, known: Archived, *, session: int, lineage: Lineage = NEVER_FORKED) -> Archived:
        contact = self._contact(partition, session)
        return await self._ask(lambda calls: calls.archiver.add(partition, session, known, lineage, contact=contact))

    async def trim(
        self, partition: int, session: int, floor: int, archived: Archived | None = None, *, needs_none: bool = False
    ) -> ReplicaStatus:
        contact = self._contact(partition, session)
        return await self._ask(
            lambda calls: calls.trim(partition, session, floor, archived, needs_none=needs_none, contact=contact)
        )

    async def back_up(
        self,
        partition: int,
        known: Archived,
        *,
        session: int,
        committed: int,
        moment: int,
        lineage: Lineage = NEVER_FORKED,
    ) -> BackedUp:
        contact = self._contact(partition, session)
        return await self._ask(
            lambda calls: calls.archiver.back_up(partition, session, known, committed, moment, lineage, contact=contact)
        )

    async def save_metadata(self, text: bytes, archive: UUID | None) -> int:
        return await self._ask(lambda calls: calls.archiver.save_metadata(text, archive))

    async def check_archive(self, partition: int, known: Archived, first_id: int, *, session: int) -> ArchiveCheck:
        contact = self._contact(partition, session)
        return await self._ask(lambda calls: calls.archiver.check(partition, session, known, first_id, contact=contact))

    async def segments(self, partition: int, *, session: int | None = None) -> list[tuple[int, int, int]]:
        contact = self._contact(partition, session)
        return await self._ask(lambda calls: calls.segments(partition, session, contact=contact))

    async def fetch_segment(self, partition: int, first_id: int, *, session: int) -> AsyncIterator[Buffer]:
        contact = self._contact(partition, session)

        async def work(calls: StorageCalls, end: End) -> None:
            async with aclosing(calls.fetch_segment(partition, session, first_id, contact=contact)) as pieces:
                async for piece in pieces:
                    await end.send(piece)

        async with aclosing(self._each(work)) as pieces:
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
        self._begun = Bell()
        self._is_given_up = False

    def caller(self) -> End:
        if self._is_given_up:
            raise CannotConnect(f"{self._what} was given up here")
        if self._stream is None:
            self._stream = self._begin()
            self._begun.ring()
        return self._stream.caller

    async def receive(self) -> Any:
        while self._stream is None:
            if self._is_given_up:
                raise CannotConnect(f"{self._what} was given up here")
            await self._begun.wait(self._begun.rings)
        return await self._stream.caller.receive()

    def cancel(self) -> None:
        self._is_given_up = True
        self._begun.ring()
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
    def __init__(self, end: End) -> None:
        self._end = end

    async def receive(self) -> RecordsFrame | None:
        frame: RecordsFrame | None = await self._end.receive()
        return frame

    async def send(self, durable_id: int) -> None:
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
        return await self._ask(lambda calls: calls.describe())

    async def fence(self, partition: int, session: int) -> ReplicaStatus:
        return await self._ask(lambda calls: calls.fence(partition, session))

    async def restore(self, order: RestoreOrder) -> AsyncGenerator[Restoring, None]:
        async def work(calls: StorageCalls, end: End) -> None:
            async with aclosing(calls.restorer.restore(order)) as states:
                async for state in states:
                    await end.send(state)
            await end.send(None)

        async with aclosing(self._each(work)) as found:
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

        return await self._ask(answer)


# -- a server ----------------------------------------------------------------------------------------------------------


class SimServerAdminPort(_Port[LocalServer]):
    async def describe(self) -> ServerDescription:
        def answer(server: LocalServer) -> ServerDescription:
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

        return await self._ask(answer)


class SimServerPort(_Port[ServerCalls]):
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
    ) -> None:
        """`identity`: what the caller's certificate says."""
        super().__init__(network, caller, name, find, seconds=seconds)
        self._key = key
        self._identity = identity

    async def locate(self) -> Topology:
        topology = await self._ask(lambda calls: calls.locate())
        if self._key is None:
            self._key = topology.cluster_key
        if self._key != topology.cluster_key:
            raise ForeignCluster(f"this server belongs to the cluster {topology.cluster_key}, not to {self._key}")
        return topology

    async def _known_key(self) -> UUID:
        return self._key or (await self.locate()).cluster_key

    def expect(self, name: str | None, streams: str = "") -> None:
        pass

    async def register(self, introduction: Introduction = INTRODUCTION) -> Registration:
        key = await self._known_key()
        return await self._ask(lambda calls: calls.register(key, self._identity, introduction))

    def mount(self) -> SimMount:
        async def work(calls: ServerCalls, end: End) -> None:
            try:
                await calls.mount(_ServerLink(end, self._identity))
            except WaltzError:
                return  # the client was told in the stream

        return SimMount(lambda: self._open(work), f"the mount at {self.name}")

    def attend(self) -> SimAttend:
        async def work(calls: ServerCalls, end: End) -> None:
            try:
                await calls.attend(_AttendLink(end, self._identity))
            except WaltzError:
                return  # the member was told in the stream

        return SimAttend(lambda: self._open(work), f"the stream of a member at {self.name}")

    async def make_group(self, meta: GroupMeta) -> MadeGroup:
        key = await self._known_key()
        return await self._ask(lambda calls: calls.make_group(key, meta, self._identity))

    async def get_group(self, name: str) -> MadeGroup:
        key = await self._known_key()
        return await self._ask(lambda calls: calls.get_group(key, name, self._identity))

    async def high_water_mark(self, partition: int, *, confirmed: bool = False, since: Position | None = None) -> Position:
        key = await self._known_key()
        return await self._ask(lambda calls: calls.high_water_mark(key, partition, confirmed=confirmed, since=since))

    async def find_time(self, partition: int, time: int) -> Position:
        key = await self._known_key()
        return await self._ask(lambda calls: calls.find_time(key, partition, time))

    async def fetch(
        self,
        partition: int,
        first_id: int,
        last_id: int | None = None,
        *,
        with_locks: bool = False,
        timeline: UUID | None = None,
    ) -> AsyncGenerator[Run, None]:
        key = await self._known_key()

        async def work(calls: ServerCalls, end: End) -> None:
            found = calls.fetch(key, partition, first_id, last_id, with_locks=with_locks, timeline=timeline)
            async with aclosing(found) as runs:
                async for run in runs:
                    await end.send(run)

        async with aclosing(self._each(work)) as runs:
            async for run in runs:
                yield run

    async def close(self) -> None:
        return None


class SimMount(_Lazy):
    """One mount, as the client holds it."""

    async def send(self, frames: Sequence[ClientFrame]) -> None:
        await self.caller().send(list(frames))

    @property
    def may_post(self) -> bool:
        return not self._is_given_up and self.caller().may_post

    def post(self, frames: Sequence[ClientFrame]) -> None:
        self.caller().post(list(frames))

    def hear(self, taker: Callable[[Sequence[ServerFrame]], None]) -> None:
        self.caller().hear(taker)


class _ServerLink:
    quiet_seconds = None

    def __init__(self, end: End, identity: str) -> None:
        self.peer = end.other.life.name
        self.identity = identity
        self._end = end

    async def receive(self) -> Sequence[ClientFrame] | None:
        frames: Sequence[ClientFrame] | None = await self._end.receive()
        return frames

    async def send(self, frames: Sequence[ServerFrame]) -> None:
        await self._end.send(list(frames))

    @property
    def may_post(self) -> bool:
        return self._end.may_post

    def post(self, frames: Sequence[ServerFrame]) -> None:
        self._end.post(list(frames))


class SimAttend(_Lazy):
    """The stream of a member of a durable group, as the member holds it."""

    async def send(self, frames: Sequence[MemberFrame]) -> None:
        await self.caller().send(list(frames))


class _AttendLink:
    def __init__(self, end: End, identity: str) -> None:
        self.peer = end.other.life.name
        self.identity = identity
        self._end = end

    async def receive(self) -> Sequence[MemberFrame] | None:
        frames: Sequence[MemberFrame] | None = await self._end.receive()
        return frames

    async def send(self, frames: Sequence[DeliveryFrame]) -> None:
        await self._end.send(list(frames))
