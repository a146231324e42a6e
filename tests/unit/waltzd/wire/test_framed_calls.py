"""Calls over a plain connection: replies in any order, servers that know none, hostile frames at both ends, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from typing import Any
from uuid import UUID

import pytest

from waltzd.client import loop
from waltzd.errors import BadArgument, CannotConnect, NotPermitted, WaltzError
from waltzd.errors.operations import BadFrame, TooManyCallers, WrongPeer
from waltzd.protocol.address import Address, parse_address
from waltzd.protocol.audit import NO_AUDIT, AuditRecord
from waltzd.protocol.batches import Refused
from waltzd.protocol.locks import MARKED_MAX, MarkedPage, MarkedQuery
from waltzd.protocol.positions import Position
from waltzd.protocol.role import Identity, Role
from waltzd.server.clients.service import LogService
from waltzd.server.clients.stream_port import StreamPort
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.calls import FETCH_MARKED
from waltzd.wire.codec import packed_server_frames, unpacked_error
from waltzd.wire.framed_calls import CALLS_MAX, FRAMED_CALLS, REPLY_HEAD, REQUEST_HEAD, REQUEST_MAX, VERSION, CallConnection
from waltzd.wire.frames import Connection, Kind, connect
from waltzd.wire.listener import create_server, listen
from waltzd.wire.servers import ServerClient
from waltzd.wire.servicer import Origin, add_service

KEY = UUID(int=7)
NOWHERE = "127.0.0.1:1"
ANY_PORT = Address("127.0.0.1", 0)
QUERY = MarkedQuery(groups=((1,), (2, 3)), limit=10)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is slow for a moment does not send calls through gRPC."""
    monkeypatch.setattr("waltzd.wire.servers.FRAMES_SECONDS", 20.0)


class Calls:
    """A server that answers when the test says so."""

    def __init__(self) -> None:
        self.gates: dict[int, asyncio.Event] = {}
        """Events by partition that an answer waits for."""
        self.asked: list[int] = []
        self.running = self.running_max = 0
        self.sent = 0
        """Answers of which the server was told that they have been sent."""

    async def fetch_marked(
        self, key: UUID, partition: int, query: MarkedQuery, *, confirmed: bool, sent: ExitStack, **_options: Any
    ) -> MarkedPage:
        assert (key, query, confirmed) == (KEY, QUERY, True)
        sent.callback(self._note_sent)
        self.asked.append(partition)
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            if partition in self.gates:
                await self.gates[partition].wait()
        finally:
            self.running -= 1
        if partition == 13:
            raise BadArgument("thirteen")
        return MarkedPage(records=(), end=Position(partition))

    def _note_sent(self) -> None:
        self.sent += 1

    async def mount(self, link: Any) -> None:
        await link.receive()


@contextlib.asynccontextmanager
async def served(calls: Any, auditor: Any = None, at: Address = ANY_PORT) -> AsyncIterator[StreamPort]:
    failed: list[BaseException] = []
    port = StreamPort(at, 8 << 20, None, *([auditor] if auditor else []))
    await port.open()
    port.serve(calls, on_fatal=failed.append)
    try:
        yield port
    finally:
        await port.stop(0)
    assert failed == []


@contextlib.asynccontextmanager
async def reached(streams: object, address: str = NOWHERE) -> AsyncIterator[ServerClient]:
    async with ServerClient(address, KEY) as client:
        client.expect(None, str(streams))
        yield client


async def asked(client: ServerClient, partition: int) -> int:
    page = await client.fetch_marked(partition, QUERY, confirmed=True)
    assert page.records == ()
    return page.end


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def timely() -> None:
        async with asyncio.timeout(30):
            await test()

    loop.run(timely())


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


def test_calls_share_a_connection_and_are_answered_in_any_order() -> None:
    async def test() -> None:
        calls = Calls()
        calls.gates[1] = asyncio.Event()
        async with served(calls) as port, reached(port.address) as client:
            first = asyncio.create_task(asked(client, 1))
            assert await asyncio.gather(*[asked(client, number) for number in (2, 3, 4)]) == [2, 3, 4]
            assert not first.done()
            with pytest.raises(BadArgument, match="thirteen"):
                await asked(client, 13)
            await until(lambda: calls.sent == 4)
            calls.gates[1].set()
            assert await first == 1
            await until(lambda: calls.sent == 5)
            assert len(client._connections) == 1

    run(test)


def test_a_caller_that_gives_up_is_not_answered_and_others_are() -> None:
    async def test() -> None:
        calls = Calls()
        calls.gates[1] = asyncio.Event()
        async with served(calls) as port, reached(port.address) as client:
            assert await asked(client, 2) == 2
            assert client._framed is not None
            request = wire.FetchMarkedRequest(
                cluster_key=KEY.bytes, partition=1, locks=[1, 2, 3], group_sizes=[1, 2], after=-1, limit=10, confirmed=True
            )
            with pytest.raises(CannotConnect, match="did not answer FetchMarked within"):
                await client._framed.ask(FETCH_MARKED, request, 0.01)
            calls.gates[1].set()
            assert await asked(client, 1) == 1
            assert client._framed._waiting == {}

    run(test)


def test_a_caller_bounds_its_calls_and_a_server_ends_those_of_a_caller_that_goes() -> None:
    async def test() -> None:
        calls = Calls()
        calls.gates[1] = asyncio.Event()
        async with served(calls) as port:
            async with reached(port.address) as client:
                asking = [asyncio.create_task(asked(client, 1)) for _ in range(CALLS_MAX + 10)]
                await until(lambda: calls.running == CALLS_MAX)
            for error in await asyncio.gather(*asking, return_exceptions=True):
                assert isinstance(error, CannotConnect)
            await until(lambda: calls.running == 0)
        assert calls.running_max == CALLS_MAX

    run(test)


def test_a_server_refuses_calls_above_the_bound() -> None:
    request = wire.FetchMarkedRequest(
        cluster_key=KEY.bytes, partition=1, locks=[1, 2, 3], group_sizes=[1, 2], after=-1, limit=10, confirmed=True
    )

    async def test() -> None:
        calls = Calls()
        calls.gates[1] = asyncio.Event()
        async with served(calls) as port:
            connection = await opened(port)
            for number in range(CALLS_MAX + 1):
                await connection.send(Kind.REQUEST, (REQUEST_HEAD.pack(number, 0), request.SerializeToString()))
            found = await connection.receive()
            assert found is not None
            assert REPLY_HEAD.unpack_from(found[1]) == (CALLS_MAX, True)
            assert isinstance(unpacked_error(bytes(found[1][REPLY_HEAD.size :])), TooManyCallers)
            connection.close()

    run(test)


def test_an_older_server_is_called_through_grpc_after_one_attempt() -> None:
    connections: list[Connection] = []
    tasks: list[asyncio.Task[None]] = []

    async def refuse(connection: Connection) -> None:
        found = await connection.receive()
        assert found is not None
        error = BadFrame("a frame of the unknown kind 19")
        await connection.send(Kind.SERVER, (packed_server_frames([Refused(error)]),))

    def accept(connection: Connection) -> None:
        connections.append(connection)
        tasks.append(asyncio.create_task(refuse(connection)))

    async def test() -> None:
        calls = Calls()
        server = create_server(8 << 20, None)
        add_service(server, "Log", LogService(calls))  # type: ignore[arg-type]
        address = f"127.0.0.1:{listen(server, Address('127.0.0.1', 0))}"
        await server.start()
        old = await asyncio.get_running_loop().create_server(lambda: Connection(1 << 20, accept), "127.0.0.1", 0)
        async with reached(f"127.0.0.1:{old.sockets[0].getsockname()[1]}", address) as client:
            assert [await asked(client, number) for number in (1, 2)] == [1, 2]
        old.close()
        await server.stop(0)
        await asyncio.gather(*tasks)

    run(test)
    assert len(connections) == 1


def test_a_lost_connection_fails_its_calls_and_the_next_call_makes_another() -> None:
    async def test() -> None:
        calls = Calls()
        calls.gates[1] = asyncio.Event()
        async with served(calls) as port, reached(port.address) as client:
            lost = asyncio.create_task(asked(client, 1))
            await until(lambda: calls.running == 1)
            for connection in client._connections:
                connection.lose(CannotConnect("pulled"))
            with pytest.raises(CannotConnect, match="pulled"):
                await lost
            assert await asked(client, 2) == 2

    run(test)


def test_calls_go_over_frames_again_when_a_server_has_come_back() -> None:
    """Its port refuses for a while, which is no reason to use gRPC for ever."""

    async def test() -> None:
        async with served(Calls()) as port, reached(port.address) as client:
            assert await asked(client, 1) == 1
            await port.stop(0)
            for _ in range(2):
                with pytest.raises(CannotConnect):
                    await asked(client, 2)
            async with served(Calls(), at=port.address):
                assert await asked(client, 3) == 3

    run(test)


def test_a_port_that_stops_closes_idle_connections_and_lets_calls_finish() -> None:
    async def test() -> None:
        calls = Calls()
        calls.gates[1] = asyncio.Event()
        async with served(calls) as port, reached(port.address) as idle, reached(port.address) as busy:
            await asked(idle, 2)
            late = asyncio.create_task(asked(busy, 1))
            await until(lambda: calls.running == 1)
            stopping = asyncio.create_task(port.stop(20))
            assert idle._framed is not None
            await until(lambda: idle._framed is not None and idle._framed.is_lost)
            assert not stopping.done()
            calls.gates[1].set()
            assert await late == 1
            await stopping

    run(test)


def hostile_requests() -> dict[str, tuple[Kind, bytes]]:
    return {
        "no call": (Kind.REQUEST, b""),
        "a head that is short": (Kind.REQUEST, bytes(REQUEST_HEAD.size - 1)),
        "another kind": (Kind.MOUNT, bytes(50)),
        "a reply": (Kind.REPLY, bytes(50)),
        "calls again": (Kind.CALLS, VERSION),
        "a large request": (Kind.REQUEST, bytes(REQUEST_MAX + 1)),
    }


@pytest.mark.parametrize("what", hostile_requests())
def test_frames_that_are_no_call_end_their_connection_only(what: str) -> None:
    async def test() -> None:
        async with served(Calls()) as port, reached(port.address) as good:
            assert await asked(good, 1) == 1
            connection = await opened(port)
            await connection.send(*sent(hostile_requests()[what]))
            found = await connection.receive()
            assert found is not None
            assert found[0] is Kind.REFUSED
            assert isinstance(unpacked_error(bytes(found[1])), BadFrame)
            connection.close()
            assert await asked(good, 2) == 2

    run(test)


def test_requests_that_cannot_be_answered_are_refused_and_the_connection_goes_on() -> None:
    request = wire.FetchMarkedRequest(cluster_key=KEY.bytes, locks=[1], group_sizes=[2]).SerializeToString()
    cases: dict[int, tuple[int, bytes, type[WaltzError]]] = {
        1: (len(FRAMED_CALLS), b"", WrongPeer),
        2: (255, b"", WrongPeer),
        3: (0, b"\xff" * 50, WaltzError),
        4: (0, request, BadFrame),
    }

    async def test() -> None:
        async with served(Calls()) as port:
            connection = await opened(port)
            for number, (code, raw, kind) in cases.items():
                await connection.send(Kind.REQUEST, (REQUEST_HEAD.pack(number, code), raw))
                found = await connection.receive()
                assert found is not None
                assert found[0] is Kind.REPLY
                assert REPLY_HEAD.unpack_from(found[1]) == (number, True)
                assert isinstance(unpacked_error(bytes(found[1][REPLY_HEAD.size :])), kind)
            connection.close()

    run(test)


def test_requests_of_a_caller_that_takes_no_replies_are_not_kept() -> None:
    """A connection could hold 128 of them, of as many bytes as the largest batch."""

    class Request(bytearray):
        """Bytes that can be referenced weakly."""

    made: list[weakref.ref[Request]] = []

    class Stuck:
        peer = "there"

        def __init__(self) -> None:
            self.replies = self.received = 0

        def admit(self, bytes_max: int) -> None:
            assert bytes_max == REQUEST_MAX

        async def send(self, kind: Kind, _parts: Any, *, gather: bool = False) -> None:
            if kind is Kind.REPLY:
                self.replies += 1
                await asyncio.Event().wait()

        async def receive(self) -> tuple[Kind, Request]:
            await until(lambda: self.replies == self.received)
            if self.received == CALLS_MAX:
                await asyncio.Event().wait()
            self.received += 1
            content = Request(REQUEST_HEAD.pack(self.received, 255))
            made.append(weakref.ref(content))
            return Kind.REQUEST, content

    async def test() -> None:
        stuck: Any = Stuck()
        served = CallConnection(stuck, LogService(None), Origin(None), NO_AUDIT)  # type: ignore[arg-type]
        serving = asyncio.create_task(served.serve())
        await until(lambda: stuck.replies == CALLS_MAX)
        assert [one() for one in made[:-1]] == [None] * (CALLS_MAX - 1)
        serving.cancel()
        await asyncio.wait([serving])

    run(test)


def test_the_largest_question_fits() -> None:
    query = wire.FetchMarkedRequest(
        cluster_key=KEY.bytes, partition=(1 << 31) - 1, locks=[(1 << 63) - 1] * MARKED_MAX, group_sizes=[1] * MARKED_MAX,
        after=(1 << 63) - 2, before=(1 << 63) - 1, limit=MARKED_MAX, reach=(1 << 63) - 1, position=(1 << 63) - 1,
        timeline=bytes(16),
    )  # fmt: skip
    assert REQUEST_HEAD.size + query.ByteSize() < REQUEST_MAX // 3


async def opened(port: StreamPort) -> Connection:
    there = parse_address(str(port.address))
    connection = await connect(there.host, there.port, role=Role.SERVER, name=None, tls=None, bytes_max=1 << 20)
    await connection.send(Kind.CALLS, (VERSION,))
    assert await connection.receive() == (Kind.CALLS, VERSION + bytes((len(FRAMED_CALLS),)))
    return connection


def sent(frame: tuple[Kind, bytes]) -> tuple[Kind, tuple[bytes]]:
    return frame[0], (frame[1],)


@pytest.mark.parametrize(
    ("kind", "content", "error"),
    [
        (Kind.REPLY, b"", CannotConnect),
        (Kind.SERVER, bytes(20), CannotConnect),
        (Kind.REPLY, REPLY_HEAD.pack(1, False) + b"\xff" * 20, BadFrame),
        (Kind.REPLY, REPLY_HEAD.pack(1, True) + b"\xff" * 20, WaltzError),
    ],
)
def test_a_server_that_sends_nonsense_fails_the_call(kind: Kind, content: bytes, error: type[WaltzError]) -> None:
    tasks: list[asyncio.Task[None]] = []

    async def lie(connection: Connection) -> None:
        await connection.receive()
        await connection.send(Kind.CALLS, (VERSION, b"\1"))
        await connection.receive()
        await connection.send(Kind.REPLY, (REPLY_HEAD.pack(99, False),))  # nobody waits for it
        await connection.send(kind, (content,))

    async def test() -> None:
        server = await asyncio.get_running_loop().create_server(
            lambda: Connection(1 << 20, lambda one: tasks.append(asyncio.create_task(lie(one)))), "127.0.0.1", 0
        )
        async with reached(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
            with pytest.raises(error):
                await asked(client, 1)
        server.close()
        await asyncio.gather(*tasks)

    run(test)


def test_a_role_without_the_right_is_refused_and_recorded() -> None:
    records: list[AuditRecord] = []
    auditor: Any = type("Ear", (), {"note": lambda self, record: records.append(record)})()

    async def test() -> None:
        for role in (Role.OBSERVER, Role.OPERATOR, Role.CLIENT):
            connection: Any = type("End", (), {"peer": "there:1"})()
            origin = Origin(Identity(KEY, role, "ann"))
            end = CallConnection(connection, LogService(Calls()), origin, auditor)  # type: ignore[arg-type]
            request = wire.FetchMarkedRequest(
                cluster_key=KEY.bytes, partition=5, locks=[1, 2, 3], group_sizes=[1, 2], after=-1, limit=10, confirmed=True
            )
            asking = end._reply(0, request.SerializeToString(), ExitStack())
            if role is Role.OBSERVER:
                with pytest.raises(NotPermitted, match="the role observer"):
                    await asking
            else:
                assert wire.FetchMarkedReply.FromString(await asking).end == 5

    run(test)
    assert [(one.who.rpartition("/")[0].rpartition("/")[2], one.what, one.partitions, one.code) for one in records] == [
        ("observer", "Log/FetchMarked", "", NotPermitted.code),
        ("operator", "Log/FetchMarked", "5", None),
    ]


def test_codes_of_calls_stay() -> None:
    names = ["FetchMarked", "HighWaterMark", "History"]
    assert [call.path for call in FRAMED_CALLS] == [f"/waltz.v1.Log/{name}" for name in names], "add at the end only"


def test_a_call_that_a_server_does_not_know_goes_through_grpc() -> None:
    tasks: list[asyncio.Task[None]] = []

    async def answer(connection: Connection) -> None:
        """Know the call with the code 0 only."""
        await connection.receive()
        await connection.send(Kind.CALLS, (VERSION, b"\1"))

    class Marks(Calls):
        async def high_water_mark(self, *_arguments: Any, **_options: Any) -> Position:
            return Position(9)

    async def test() -> None:
        marks: Any = Marks()
        server = create_server(8 << 20, None)
        add_service(server, "Log", LogService(marks))
        address = f"127.0.0.1:{listen(server, Address('127.0.0.1', 0))}"
        await server.start()
        old = await asyncio.get_running_loop().create_server(
            lambda: Connection(1 << 20, lambda one: tasks.append(asyncio.create_task(answer(one)))), "127.0.0.1", 0
        )
        async with reached(f"127.0.0.1:{old.sockets[0].getsockname()[1]}", address) as client:
            assert await client.high_water_mark(3) == 9
        async with served(marks) as port, reached(port.address) as client:
            assert await client.high_water_mark(3) == 9, "where frames carry it, nobody answers by gRPC"
        old.close()
        await server.stop(0)
        await asyncio.gather(*tasks)

    run(test)
    assert len(tasks) == 1
