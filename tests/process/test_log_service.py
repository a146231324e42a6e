"""The service for applications over real connections: what a client meets when streams end, break, stall and lie.

The partition behind it is `tests.unit.mounting`'s, so that a test decides what is committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID

import grpc.aio
import pytest

from tests.unit.mounting import KEY, FakeSession, Room, batch_of, mount_request, single_of
from waltzd.client import loop
from waltzd.errors import BeyondLog, CannotConnect, ForeignCluster, WaltzError
from waltzd.errors.operations import BadFrame, NotOwner
from waltzd.format.batch import End
from waltzd.format.record import Run, encode_payloads
from waltzd.protocol.address import Address, parse_address
from waltzd.protocol.audit import NO_AUDIT, Auditor, AuditRecord
from waltzd.protocol.batches import (
    Committals,
    Credit,
    Feed,
    FeedMode,
    HeadFeed,
    Mounted,
    Refusals,
    Refused,
    ServerFrame,
    SingleAppend,
)
from waltzd.protocol.locks import Mode
from waltzd.protocol.peers import MountPort
from waltzd.protocol.role import Role
from waltzd.server.clients.service import LogService
from waltzd.server.clients.stream_port import FIRST_BYTES, StreamPort
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.calls import MOUNT
from waltzd.wire.codec import client_message, packed_single, server_frames
from waltzd.wire.frames import Kind, connect
from waltzd.wire.listener import create_server, listen
from waltzd.wire.servers import CALL_SECONDS, ServerClient
from waltzd.wire.servicer import add_service

Test = Callable[[Room, str], Awaitable[None]]
_streams: dict[str, str] = {}
"""Where mounts go without gRPC, by the address for everything else; empty while they go through gRPC."""


@pytest.fixture(autouse=True, params=["grpc", "frames"])
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What carries the mounts of a test."""
    found: str = request.param
    monkeypatch.setitem(_streams, "carrier", found)
    return found


def reached(address: str, key: UUID | None = None, *, seconds: float = CALL_SECONDS) -> ServerClient:
    client = ServerClient(address, key, seconds=seconds)
    client.expect(None, _streams.get(address, ""))
    return client


@contextlib.asynccontextmanager
async def served(room: Room, auditor: Auditor = NO_AUDIT) -> AsyncIterator[str]:
    server = create_server(8 << 20, None, auditor)
    add_service(server, "Log", LogService(room.calls, auditor))
    port = listen(server, Address("127.0.0.1", 0))
    await server.start()
    address = f"127.0.0.1:{port}"
    failed: list[BaseException] = []
    streams = StreamPort(Address("127.0.0.1", 0), 8 << 20, None, auditor)
    await streams.open()
    streams.serve(room.calls, on_fatal=failed.append)
    if _streams["carrier"] == "frames":
        _streams[address] = str(streams.address)
    try:
        yield address
    finally:
        _streams.pop(address, None)  # the next room may get the same port
        await streams.stop(0)
        await server.stop(0)
    assert failed == []


def over_grpc(
    test: Test, caplog: pytest.LogCaptureFixture, *, commits_at_once: bool = True, end: End | None = None, **settings: Any
) -> None:
    """Run a test against a served room. Nothing may be logged: what a client does is not a mistake of the server."""

    async def run() -> None:
        room = Room(FakeSession(commits_at_once=commits_at_once, tail_bytes=100_000, end=end), **settings)
        async with asyncio.timeout(60):
            async with served(room) as address:
                await test(room, address)
                while room.capacity.callers and room.pipe.ended is None:
                    await asyncio.sleep(0.01)
            await room.close()

    with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as slow:
        slow.setattr("waltzd.server.clients.mounts.REFUSED_SECONDS", 30.0)  # otherwise the status could overtake a refusal
        loop.run(run())
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def hear(stream: MountPort, *kinds: type) -> list[ServerFrame]:
    """Receive until a frame of each of these kinds has come."""
    found: list[ServerFrame] = []
    while not all(any(isinstance(frame, kind) for frame in found) for kind in kinds):
        frames = await stream.receive()
        assert frames is not None, found
        found += frames
    return found


async def mounted(client: ServerClient, who: int = 1, **request: Any) -> MountPort:
    stream = client.mount()
    await stream.send([mount_request(who, **request)])
    assert [type(frame) for frame in await stream.receive() or ()] == [Mounted]
    return stream


def test_everything_that_needs_no_mount(caplog: pytest.LogCaptureFixture) -> None:
    async def test(room: Room, address: str) -> None:
        room.session.append(encode_payloads(0, [b"%d" % number * 100 for number in range(300)]))
        room.session.append(encode_payloads(300, [b"%d" % number for number in range(2000)]))
        room.session.append(encode_payloads(2300, [b"x" * 2000 for _ in range(100)]))
        async with reached(address) as client:
            assert await client.locate() == room.topology()
            assert [(await client.register()).client for _ in range(2)] == [1, 2]
            assert await client.high_water_mark(3) == 2399
            runs = [run async for run in client.fetch(3, 5)]
            assert [id_ for run in runs for id_ in range(run.first_id, run.last_id + 1)] == list(range(5, 2400))
            assert room.session.reads != []
            assert [run async for run in client.fetch(3, 2400)] == []
            with pytest.raises(BeyondLog) as beyond:
                await anext(client.fetch(3, 0, 2400))
            assert beyond.value.facts == {"high_water_mark": "2399"}
            with pytest.raises(NotOwner) as moved:
                await client.high_water_mark(1)
            assert moved.value.facts == {"owner": "two"}
        async with reached(address, UUID(int=99)) as stranger:
            for call in (stranger.locate(), stranger.register(), stranger.high_water_mark(3), anext(stranger.fetch(3, 0))):
                with pytest.raises(ForeignCluster):
                    await call

    over_grpc(test, caplog)


def test_a_mount_from_beginning_to_end(caplog: pytest.LogCaptureFixture) -> None:
    async def test(room: Room, address: str) -> None:
        async with reached(address, KEY) as client:
            stream = await mounted(client, feed=FeedMode.RECORDS, credit=10_000)
            locks = [[(4, Mode.WRITE)], [(4, Mode.WRITE)], []]
            await stream.send([Credit(5), batch_of(b"a", b"b", b"c", first=7, locks=locks)])
            frames = await hear(stream, Committals, Refusals, Feed)
            (committals,) = [frame for frame in frames if isinstance(frame, Committals)]
            assert (committals.sequences.tolist(), committals.ids.tolist()) == ([7, 9], [0, 1])
            (refusals,) = [frame for frame in frames if isinstance(frame, Refusals)]
            assert (refusals.sequences.tolist(), refusals.locks.tolist()) == ([8], [4])
            (feed,) = [frame for frame in frames if isinstance(frame, Feed)]
            assert [feed.run.record(number).payload for number in range(2)] == [b"a", b"c"]
            stream.cancel()
            assert await stream.receive() is None
            with pytest.raises(CannotConnect, match="was cancelled here"):
                await stream.send([Credit(1)])

    over_grpc(test, caplog)


class Ear:
    def __init__(self) -> None:
        self.deeds: list[AuditRecord] = []

    def note(self, deed: AuditRecord) -> None:
        self.deeds.append(deed)


def test_the_audit_log_is_told_of_each_mount_and_of_no_append() -> None:
    ear = Ear()

    async def run() -> None:
        room = Room(FakeSession(tail_bytes=100_000))
        async with asyncio.timeout(60), served(room, ear) as address:
            async with reached(address, KEY) as client:
                await client.register()
                await client.high_water_mark(3)
                stream = await mounted(client)
                await stream.send([batch_of(b"a", b"b")])
                await stream.receive()
                stream.cancel()
                while len(ear.deeds) < 3:
                    await asyncio.sleep(0.01)
                late = client.mount()
                await late.send([mount_request(1, partition=1)])
                assert [type(frame) for frame in await late.receive() or ()] == [Refused]
                late.cancel()
            async with reached(address, UUID(int=99)) as stranger:
                with pytest.raises(ForeignCluster):
                    await stranger.high_water_mark(3)
            while len(ear.deeds) < 5:
                await asyncio.sleep(0.01)

    loop.run(run())
    assert [(deed.what, deed.partitions, deed.code) for deed in ear.deeds] == [
        ("Log/Register", "", None),
        ("Log/Mount", "3", None),
        ("Log/Mount/end", "3", None),
        ("Log/Mount", "1", NotOwner.code),
        ("Log/HighWaterMark", "", ForeignCluster.code),
    ]
    assert {deed.who for deed in ear.deeds} == {"anonymous"}
    assert "client=1 feed=" in ear.deeds[1].about
    assert all(deed.peer.startswith("127.0.0.1:") for deed in ear.deeds)


def test_groups_times_and_locks_travel(caplog: pytest.LogCaptureFixture) -> None:
    async def test(room: Room, address: str) -> None:
        async with reached(address, KEY) as client:
            stream = client.mount()
            await stream.send([mount_request(1, feed=FeedMode.HEADS, credit=10_000)])
            (greeting,) = await stream.receive() or ()
            assert isinstance(greeting, Mounted)
            assert greeting.format == 1
            locks = [[(4, Mode.WRITE)], [], [(5, Mode.READ), (6, Mode.APPEND)]]
            await stream.send([batch_of(b"a", b"b", b"c", locks=locks, groups=[1, 2], seen_time=1060)])
            frames = await hear(stream, Committals, HeadFeed)
            (committals,) = [frame for frame in frames if isinstance(frame, Committals)]
            (feed,) = [frame for frame in frames if isinstance(frame, HeadFeed)]
            assert (committals.ids.tolist(), committals.time) == ([0, 1, 2], 1060)
            assert feed.times is not None
            assert feed.follows is not None
            assert (feed.times.tolist(), feed.follows.tolist()) == ([1060] * 3, [False, False, True])
            (run,) = [run async for run in client.fetch(3, 1, with_locks=True)]
            assert run.follows is not None
            assert run.locks is not None
            assert (run.follows.tolist(), run.locks.counts.tolist()) == ([False, True], [0, 2])
            assert (run.locks.ids.tolist(), run.locks.modes.tolist()) == ([5, 6], [Mode.READ, Mode.APPEND])
            (cut,) = [run async for run in client.fetch(3, 0, 1)]
            assert (cut.locks, cut.goes_on) == (None, True)
            assert [await client.find_time(3, time) for time in (1061, 1060)] == [2, -1]
            stream.cancel()

    over_grpc(test, caplog, end=End(), clock=lambda: 1000)


def test_a_mount_that_is_not_let_in(caplog: pytest.LogCaptureFixture) -> None:
    async def test(room: Room, address: str) -> None:
        async with reached(address, KEY) as client:
            stream = client.mount()
            await stream.send([mount_request(generation=6)])
            with contextlib.suppress(WaltzError):  # what was sent behind it does not hide the reason
                for number in range(20):
                    await stream.send([batch_of(b"x" * 10_000, first=number)])
            (refused,) = await stream.receive() or ()
            assert isinstance(refused, Refused)
            assert type(refused.error) is NotOwner
            assert await stream.receive() is None
            with pytest.raises(NotOwner):
                await stream.send([Credit(1)])
            assert room.session.runs == []

    over_grpc(test, caplog)


def test_giving_up_a_mount_is_not_the_end_of_the_task_that_listens(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC reports a call that was cancelled as if the task had been."""

    async def test(room: Room, address: str) -> None:
        async with reached(address, KEY) as client:
            stream = await mounted(client, 1)
            listening = asyncio.create_task(stream.receive())
            await asyncio.sleep(0.01)
            stream.cancel()
            with pytest.raises(CannotConnect, match="was cancelled here"):
                await listening
            stream = await mounted(client, 2)
            listening = asyncio.create_task(stream.receive())
            await asyncio.sleep(0.01)
            listening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await listening

    over_grpc(test, caplog)


def test_a_client_that_goes_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    """At every point: before its request, behind it, while it is read to, while it writes."""

    async def test(room: Room, address: str) -> None:
        room.session.append(encode_payloads(0, [b"x" * 1000 for _ in range(3000)]))
        for number in range(60):
            async with reached(address, KEY) as client:
                stream = client.mount()
                with contextlib.suppress(CannotConnect):
                    if number % 6 > 0:
                        await stream.send([mount_request(number, feed=FeedMode.RECORDS)])
                    if number % 6 > 1:
                        await stream.receive()
                    if number % 6 > 2:
                        await stream.send([batch_of(*[b"y" * 1000] * 50)])
                    if number % 6 > 3:
                        await stream.receive()
                if number % 6 > 4:
                    reading = asyncio.create_task(stream.receive())
                    await asyncio.sleep(0)
                    stream.cancel()
                    with contextlib.suppress(CannotConnect):
                        await reading
                elif number % 2:
                    stream.cancel()
        while room.capacity.callers or room.session.reads_at_once:
            await asyncio.sleep(0.01)
        assert room.pipe.mounts == 0
        assert room.queued_bytes == 0

    over_grpc(test, caplog)


def test_a_client_that_does_not_read_is_bounded_and_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async def test(room: Room, address: str) -> None:
        async with reached(address, KEY) as deaf, reached(address, KEY) as good:
            silent = await mounted(deaf, 1, feed=FeedMode.RECORDS)

            async def flood() -> None:
                for number in range(2000):
                    await silent.send([batch_of(b"z" * 50_000, first=number)])

            flooding = asyncio.create_task(flood())
            stream, done = await mounted(good, 2), 0
            while done < 200:
                await stream.send([batch_of(b"good", first=done)])
                frames = await hear(stream, Committals)
                done += len([frame for frame in frames if isinstance(frame, Committals)])
            assert room.session.cache.bytes <= 100_000 + 60_000, "the tail is not kept for a reader"
            assert room.session.reads_at_once <= 1
            flooding.cancel()
            silent.cancel()
            await asyncio.gather(flooding, return_exceptions=True)
            await stream.send([batch_of(b"still good", first=done)])
            await hear(stream, Committals)

    over_grpc(test, caplog)


def test_what_is_never_committed_stops_the_sender_and_not_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    async def test(room: Room, address: str) -> None:
        async with reached(address, KEY) as client:
            stream = await mounted(client)

            async def flood() -> None:
                for number in range(400):
                    await stream.send([batch_of(b"z" * 50_000, first=number)])

            flooding = asyncio.create_task(flood())
            while room.inflight_bytes < 1_000_000 or not room.queued_bytes:
                await asyncio.sleep(0.01)
            assert not flooding.done()
            assert room.inflight_bytes <= 1_000_000 + (1 << 20)
            assert room.queued_bytes <= 1_000_000
            while not flooding.done():
                if room.pipe.committed < room.pipe.last_id:
                    room.session.commit(room.pipe.last_id)
                await asyncio.sleep(0.001)
            await flooding
            while not room.pipe.last_id == room.pipe.committed == 399:
                room.session.commit(room.pipe.last_id)
                await asyncio.sleep(0.001)
            answered: set[int] = set()
            while len(answered) < 400:
                frames = await hear(stream, Committals)
                answered |= {id_ for frame in frames if isinstance(frame, Committals) for id_ in frame.ids.tolist()}

    over_grpc(test, caplog, commits_at_once=False, inflight_bytes_max=1_000_000)


NONSENSE = [b"", b"\xff" * 50, wire.ClientFrame(append=[wire.AppendBatch(marks=b"12345")]).SerializeToString()]


@pytest.mark.parametrize("raw", NONSENSE, ids=["nothing", "no message", "half a number"])
@pytest.mark.parametrize("is_mounted", [False, True])
def test_nonsense_is_refused_in_one_stream_only(raw: bytes, is_mounted: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def test(room: Room, address: str) -> None:
        channel = grpc.aio.insecure_channel(address)
        async with reached(address, KEY) as client:
            good = await mounted(client, 1)
            call: Any = channel.stream_stream("/waltz.v1.Log/Mount")()
            if is_mounted:
                await call.write(client_message([mount_request(2)]).SerializeToString())
                await call.read()
            await call.write(raw)
            answer = wire.ServerFrame.FromString(await call.read())
            (refused,) = server_frames(answer)
            assert isinstance(refused, Refused)
            assert isinstance(refused.error, BadFrame)
            call.cancel()
            await good.send([batch_of(b"good")])
            await hear(good, Committals)
        await channel.close()

    over_grpc(test, caplog)


def test_the_status_says_the_same_for_who_does_not_read_frames(caplog: pytest.LogCaptureFixture) -> None:
    async def test(room: Room, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            mount: Any = channel.stream_stream(MOUNT.path, MOUNT.request.SerializeToString, MOUNT.reply.FromString)
            call = mount()
            await call.write(client_message([mount_request(generation=9)]))
            await call.done_writing()
            assert (await call.read()).HasField("refused")
            assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "W2003" in await call.details()

    over_grpc(test, caplog)


def test_a_server_that_stops_or_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        room = Room(FakeSession())
        async with asyncio.timeout(60):
            async with served(room) as address:
                client = reached(address, KEY, seconds=30)
                stream = await mounted(client)
            with pytest.raises(CannotConnect):
                await stream.receive()
            with pytest.raises(CannotConnect):
                await stream.send([Credit(1)])
            for call in (client.locate(), client.high_water_mark(3), anext(client.fetch(3, 0))):
                with pytest.raises(CannotConnect):
                    await call
            late = client.mount()
            with contextlib.suppress(CannotConnect):
                await late.send([mount_request()])
            with pytest.raises(CannotConnect):
                await late.receive()
            await client.close()
            await room.close()

    loop.run(run())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_read_that_gets_stuck_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def test(room: Room, address: str) -> None:
        for first_id in range(0, 300, 10):
            room.session.append(encode_payloads(first_id, [b"x" * 1000] * 10))
        room.session.gate = asyncio.Event()
        async with reached(address, KEY, seconds=0.2) as hasty:
            with pytest.raises(CannotConnect, match="sent nothing"):
                await anext(hasty.fetch(3, 0))
        while room.session.reads_at_once:
            await asyncio.sleep(0.01)
        async with reached(address, KEY, seconds=60) as client:  # it is ended before it would end by itself
            task = asyncio.create_task(_first(client.fetch(3, 0)))
            while not room.session.reads_at_once:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    over_grpc(test, caplog)


async def _first(runs: AsyncIterator[Run]) -> Run:
    return await anext(runs)


async def _swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As a firewall that drops what comes, but for the connection itself."""
    with contextlib.suppress(ConnectionError):
        await reader.read()
    writer.close()


def test_where_frames_do_not_get_through_grpc_is_taken_and_said_so_once(
    carrier: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        room = Room(FakeSession())
        async with asyncio.timeout(20), served(room) as address, ServerClient(address, KEY) as client:
            with socket.create_server(("127.0.0.1", 0)) as nobody:
                refused = f"127.0.0.1:{nobody.getsockname()[1]}"
            client.expect(None, refused)
            for number in (1, 2):
                stream = await mounted(client, number=number)
                await stream.send([batch_of(b"x", first=number)])
                await hear(stream, Committals)
                stream.cancel()
            silent = await asyncio.start_server(_swallow, "127.0.0.1", 0)
            async with silent, ServerClient(address, KEY) as other:
                other.expect(None, f"127.0.0.1:{silent.sockets[0].getsockname()[1]}")
                await mounted(other, number=3)
            for mistake in ("no address", "127.0.0.1:99999"):
                async with ServerClient(address, KEY) as other:
                    other.expect(None, mistake)
                    await mounted(other, number=4)
        await room.close()

    if carrier == "frames":
        monkeypatch.setattr("waltzd.wire.servers.FRAMES_SECONDS", 0.1)
        with caplog.at_level(logging.WARNING):
            loop.run(run())
        told = [record.getMessage() for record in caplog.records if "through gRPC" in record.getMessage()]
        assert len(told) == 4
        assert "stream_port" in told[0]


def test_frames_that_are_no_mount_are_refused_and_the_others_go_on(carrier: str, caplog: pytest.LogCaptureFixture) -> None:
    """Another kind, nonsense, and more than a stranger may send; behind a mount, another kind."""
    request = client_message([mount_request(2)]).SerializeToString()
    first = [(Kind.HELLO, request), (Kind.CLIENT, request), (Kind.MOUNT, b"\xff" * 50), (Kind.MOUNT, bytes(5000))]
    damaged = b"".join(packed_single(SingleAppend(0, -1, 0, 1, (), (), b"x", 0)))
    first.append((Kind.SINGLE, b"".join(packed_single(single_of(batch_of(b"x"))))))
    later = [(Kind.MOUNT, request), (Kind.RECORDS, request), (Kind.CLIENT, b"\xff" * 50), (Kind.CLIENT, b"")]
    later += [(Kind.SINGLE, b""), (Kind.SINGLE, b"\xff" * 50), (Kind.SINGLE, damaged), (Kind.COMMITTED, bytes(20))]

    async def test(room: Room, address: str) -> None:
        if carrier != "frames":
            return
        there = parse_address(_streams[address])
        async with reached(address, KEY) as client:
            good = await mounted(client, 1)
            for is_mounted, (kind, content) in [(False, one) for one in first] + [(True, one) for one in later]:
                connection = await connect(there.host, there.port, role=Role.SERVER, name=None, tls=None, bytes_max=1 << 20)
                if is_mounted:
                    await connection.send(Kind.MOUNT, (request,))
                    assert await connection.receive() is not None
                await connection.send(kind, (content,))
                answer = await connection.receive()
                assert answer is not None
                (refused,) = server_frames(wire.ServerFrame.FromString(bytes(answer[1])))
                assert isinstance(refused, Refused)
                assert isinstance(refused.error, BadFrame)
                assert len(content) < FIRST_BYTES or f"{FIRST_BYTES} are allowed" in refused.error.message
                connection.close()
            assert room.session.pieces == []
            await good.send([batch_of(b"good")])
            await hear(good, Committals)

    over_grpc(test, caplog)


def test_a_transaction_alone_is_the_same_for_a_server_that_takes_it_so_and_for_an_older_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Over frames it travels without protobuf, over gRPC as a batch of one."""

    async def test(room: Room, address: str) -> None:
        async with reached(address, KEY) as client:
            stream = await mounted(client, 1)
            for number in range(3):
                batch = batch_of(b"%d" % number, first=number, locks=[[(5, Mode.APPEND)]], header=number)
                await stream.send([single_of(batch)])
                frames = await hear(stream, Committals)
                (committals,) = [frame for frame in frames if isinstance(frame, Committals)]
                assert [list(column) for column in committals.lists] == [[number], [number]]
            assert room.session.payloads() == [b"0", b"1", b"2"]
            await stream.send([single_of(batch_of(b"again"))])
            frames = await hear(stream, Refused)
            assert isinstance(frames[-1], Refused)
            assert "starts at sequence 0" in frames[-1].error.message

    over_grpc(test, caplog)
