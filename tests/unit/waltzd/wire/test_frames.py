"""Frames over a plain connection: whole however they are cut, bounded, and lost when nobody is heard."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Coroutine
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batches import batches_of as encoded_batches
from tests.simulation.loop import SimLoop
from waltzd.disk.seam import Buffer
from waltzd.errors import CannotConnect, NoSuchPartition
from waltzd.errors.operations import BadFrame
from waltzd.format.batch import Batch, why_wrong
from waltzd.format.record import encode_payloads
from waltzd.protocol.peers import Contact
from waltzd.wire.codec import packed_error, unpacked_error
from waltzd.wire.frames import (
    FRAME_COST,
    GATHERED_MAX,
    HEAD,
    QUIET_SECONDS,
    SMALL_BYTES,
    START_BYTES,
    WAITING_MAX,
    Connection,
    Kind,
)
from waltzd.wire.streams import Hello, batches_of, batches_parts, mark_bytes, mark_of, records_of, records_parts

BYTES_MAX = 4 << 20
Frames = list[tuple[Kind, bytes]]


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.listens = True
        self.is_over = False

    def writelines(self, parts: Any) -> None:
        for part in parts:
            self.written += part

    def pause_reading(self) -> None:
        self.listens = False

    def resume_reading(self) -> None:
        self.listens = True

    def is_closing(self) -> bool:
        return self.is_over

    def abort(self) -> None:
        self.is_over = True

    def close(self) -> None:
        self.is_over = True


def standing() -> tuple[Connection, Wire]:
    connection, wire = Connection(BYTES_MAX), Wire()
    connection.connection_made(wire)
    return connection, wire


def put(connection: Connection, raw: bytes, sizes: list[int]) -> None:
    """As the loop does it: into whatever memory is offered, in pieces."""
    view, at, turn = memoryview(raw), 0, 0
    while at < len(raw):
        room = connection.get_buffer(-1)
        count = min(len(room), len(raw) - at, sizes[turn % len(sizes)])
        room[:count] = view[at : at + count]
        connection.buffer_updated(count)
        at, turn = at + count, turn + 1


def spelled(frames: Frames) -> bytes:
    return b"".join(HEAD.pack(len(content), kind) + content for kind, content in frames)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


STARTS = [START_BYTES - 1, START_BYTES, START_BYTES + 1]
SIZES = st.sampled_from([0, 1, 7, 300, *STARTS, SMALL_BYTES - 1, SMALL_BYTES, SMALL_BYTES + 1, 3 * SMALL_BYTES + 5])
KINDS = st.sampled_from([Kind.HELLO, Kind.RECORDS, Kind.MARK, Kind.REFUSED])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(KINDS, SIZES), max_size=6),
    st.lists(st.integers(1, 200_000), max_size=4).map(lambda cuts: [*cuts, 20_000]),
)
def test_frames_come_whole_however_they_are_cut(wanted: list[tuple[Kind, int]], cuts: list[int]) -> None:
    frames = [(kind, random.Random(size).randbytes(size)) for kind, size in wanted]

    async def check() -> None:
        connection, _ = standing()
        put(connection, spelled(frames), cuts)
        found = [await connection.receive() for _ in frames]
        assert [(one[0], bytes(one[1])) for one in found if one is not None] == frames
        connection.close()

    run(check())


def test_a_buffer_grows_when_more_comes_than_it_holds() -> None:
    async def check() -> None:
        connection, _ = standing()
        marks = [(Kind.MARK, mark_bytes(mark)) for mark in range(1000)]
        for mark in marks:
            put(connection, spelled([mark]), [1000])
        assert len(connection._buffer) == START_BYTES + HEAD.size
        put(connection, spelled(marks), [SMALL_BYTES])
        assert len(connection._buffer) == SMALL_BYTES + HEAD.size
        assert [await connection.receive() for _ in range(2000)] == 2 * marks
        connection.close()

    run(check())


def of_a_stranger() -> tuple[Connection, Wire]:
    connection, wire = Connection(BYTES_MAX, first_max=40), Wire()
    connection.connection_made(wire)
    return connection, wire


@pytest.mark.parametrize("cuts", [[1], [50], [7, 30]])
def test_nothing_is_read_behind_the_first_frame_of_a_stranger(cuts: list[int]) -> None:
    frames = [(Kind.HELLO, b"it is me"), (Kind.RECORDS, bytes(3 * SMALL_BYTES)), (Kind.STATUS, b"")]

    async def check() -> None:
        connection, wire = of_a_stranger()
        raw, sent = spelled(frames), 0
        assert len(connection._buffer) < 100
        while wire.listens and sent < len(raw):
            put(connection, raw[sent : sent + cuts[0]], cuts)
            sent += cuts[0]
        assert await connection.receive() == frames[0]
        assert not wire.listens
        assert sent <= len(frames[0][1]) + HEAD.size + cuts[0]
        connection.admit()
        put(connection, raw[sent:], [1000])
        assert [await connection.receive() for _ in frames[1:]] == frames[1:]
        connection.close()

    run(check())


def test_a_stranger_that_is_not_let_in_may_only_go() -> None:
    async def check() -> None:
        for size in (8, 40, 41, BYTES_MAX):
            connection, wire = of_a_stranger()
            put(connection, spelled([(Kind.HELLO, b"")]), [5])
            assert await connection.receive() == (Kind.HELLO, b"")
            waiting = asyncio.create_task(connection.receive())
            await asyncio.sleep(0)
            assert wire.listens
            put(connection, spelled([(Kind.RECORDS, bytes(size))])[:45], [45])
            if size > 40:
                with pytest.raises(BadFrame, match="40 are allowed"):
                    await waiting
                assert connection._large is None
            else:
                assert await waiting == (Kind.RECORDS, bytes(size))
            connection.close()

    run(check())


def test_who_takes_nothing_gets_no_more_signs_of_life() -> None:
    async def check() -> None:
        connection, wire = standing()
        put(connection, spelled([(Kind.ASKED, b"")] * 3), [100])
        assert len(wire.written) == 3 * HEAD.size
        connection.pause_writing()
        put(connection, spelled([(Kind.ASKED, b"")] * 1000), [100])
        assert len(wire.written) == 3 * HEAD.size
        connection.close()

    run(check())


def test_what_is_sent_is_what_comes() -> None:
    async def check() -> None:
        sender, wire = standing()
        taker, _ = standing()
        await sender.send(Kind.RECORDS, (b"ab", memoryview(b"cde"), bytearray(b"f")))
        await sender.send(Kind.STATUS)
        put(taker, bytes(wire.written), [3])
        assert await taker.receive() == (Kind.RECORDS, b"abcdef")
        assert await taker.receive() == (Kind.STATUS, b"")
        sender.close()
        taker.close()

    run(check())


@pytest.mark.parametrize(
    ("raw", "words"),
    [(HEAD.pack(BYTES_MAX + 1, Kind.RECORDS), "are allowed"), (HEAD.pack(0, 77), "unknown kind 77")],
    ids=["too large", "of no kind"],
)
def test_nonsense_is_told_once_and_nothing_is_allocated_for_it(raw: bytes, words: str) -> None:
    async def check() -> None:
        connection, wire = standing()
        put(connection, spelled([(Kind.MARK, b"x")]) + raw, [1000])
        assert not wire.listens
        assert await connection.receive() == (Kind.MARK, b"x"), "what came before counts"
        with pytest.raises(BadFrame, match=words):
            await connection.receive()
        assert await connection.receive() is None
        await connection.send(Kind.REFUSED, (b"why",))
        assert wire.written
        connection.close()

    run(check())


def test_a_stranger_may_say_little() -> None:
    async def check() -> None:
        connection, _ = of_a_stranger()
        put(connection, HEAD.pack(41, Kind.HELLO), [1000])
        with pytest.raises(BadFrame, match="40 are allowed"):
            await connection.receive()
        connection.close()

    run(check())


def test_who_is_not_read_from_is_not_listened_to() -> None:
    async def check() -> None:
        connection, wire = standing()
        frame = (Kind.RECORDS, bytes(WAITING_MAX // 2 - FRAME_COST))
        put(connection, spelled([frame]), [1 << 20])
        assert wire.listens
        put(connection, spelled([frame, frame]), [1 << 20])
        assert not wire.listens
        await connection.receive()
        assert not wire.listens
        await connection.receive()
        assert wire.listens
        connection.close()

    run(check())


def test_a_flood_of_empty_frames_is_bounded() -> None:
    async def check() -> None:
        connection, wire = standing()
        put(connection, spelled([(Kind.GO_ON, b"")] * (WAITING_MAX // FRAME_COST)), [1 << 20])
        assert wire.listens
        put(connection, spelled([(Kind.GO_ON, b"")]), [1 << 20])
        assert not wire.listens
        for _ in range(WAITING_MAX // FRAME_COST // 2 + 2):
            assert await connection.receive() == (Kind.GO_ON, b"")
        assert wire.listens
        connection.close()

    run(check())


def test_who_sends_waits_while_the_connection_is_full() -> None:
    async def check() -> None:
        connection, wire = standing()
        connection.pause_writing()
        sending = asyncio.create_task(connection.send(Kind.STATUS))
        await asyncio.sleep(0)
        assert not wire.written
        connection.resume_writing()
        await sending
        assert wire.written
        connection.pause_writing()
        sending = asyncio.create_task(connection.send(Kind.STATUS))
        await asyncio.sleep(0)
        connection.lose(CannotConnect("it went away"))
        with pytest.raises(CannotConnect, match="it went away"):
            await sending

    run(check())


def test_gathered_frames_are_written_together_and_none_is_left_behind() -> None:
    async def check() -> None:
        connection, wire = standing()
        frames = [(Kind.REPLY, bytes([number])) for number in range(GATHERED_MAX + 3)]
        for kind, content in frames[:-1]:
            await connection.send(kind, (content,), gather=True)
        assert wire.written == spelled(frames[:GATHERED_MAX])
        await asyncio.sleep(0)
        assert wire.written == spelled(frames[:-1])
        await connection.send(Kind.REPLY, (frames[-1][1],), gather=True)
        connection.close()
        assert wire.written == spelled(frames), "what was sent leaves before the connection is closed"
        await asyncio.sleep(0)
        assert wire.written == spelled(frames)

    run(check())


def test_who_sends_without_end_leaves_others_their_turn() -> None:
    async def check() -> None:
        connection, _ = standing()
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(5000):
            await connection.send(Kind.MARK, (bytes(100),))
        assert 3 < turns < 50
        task.cancel()
        connection.close()

    run(check())


def test_an_end_is_told_behind_what_came() -> None:
    async def check() -> None:
        connection, _ = standing()
        put(connection, spelled([(Kind.MARK, b"1")]), [100])
        connection.eof_received()
        connection.connection_lost(None)
        assert await connection.receive() == (Kind.MARK, b"1")
        assert await connection.receive() is None
        with pytest.raises(CannotConnect):
            await connection.send(Kind.STATUS)

    run(check())


class Clogged(Wire):
    """Has frames to send that the other side does not take: to close it ends nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


def closed_by_the_other_side(connection: Connection, wire: Wire) -> None:
    assert not connection.eof_received()
    wire.close()  # as the loop does it


def closed_here(connection: Connection, wire: Wire) -> None:
    connection.close()


@pytest.mark.parametrize("end", [closed_by_the_other_side, closed_here])
def test_what_is_not_taken_keeps_no_connection_that_is_closed(end: Callable[[Connection, Wire], None]) -> None:
    async def check() -> None:
        connection, wire = Connection(BYTES_MAX), Clogged()
        connection.connection_made(wire)
        end(connection, wire)
        connection.close()
        await asyncio.sleep(QUIET_SECONDS - 0.1)
        assert not wire.is_aborted, "what was sent may still leave"
        await asyncio.sleep(0.2)
        assert wire.is_aborted

    on_virtual_time(check())


def test_a_connection_that_has_ended_is_not_kept_for_its_closing() -> None:
    async def check() -> None:
        connection, wire = Connection(BYTES_MAX), Clogged()
        connection.connection_made(wire)
        connection.connection_lost(None)
        connection.close()
        await asyncio.sleep(2 * QUIET_SECONDS)
        assert not wire.is_aborted

    on_virtual_time(check())


def on_virtual_time(work: Coroutine[Any, Any, None]) -> None:
    loop = SimLoop(steps_max=10_000)
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


def test_who_is_quiet_is_asked_and_who_does_not_answer_is_lost() -> None:
    async def check() -> None:
        connection, wire = standing()
        await asyncio.sleep(1.5 * QUIET_SECONDS)
        assert bytes(wire.written) == HEAD.pack(0, Kind.ASKED)
        assert connection.quiet_seconds == pytest.approx(1.5 * QUIET_SECONDS)
        put(connection, HEAD.pack(0, Kind.ALIVE), [1])
        assert connection.quiet_seconds == 0
        await asyncio.sleep(QUIET_SECONDS)
        assert not wire.is_over
        with pytest.raises(CannotConnect, match="was silent"):
            await connection.receive()
        assert wire.is_over

    on_virtual_time(check())


@pytest.mark.parametrize("ends_by_itself", [False, True])
def test_who_is_no_longer_listened_to_and_takes_nothing_is_lost(ends_by_itself: bool) -> None:
    """A sender waited for ever: such a connection is not asked for a heartbeat, and to close it ends nothing."""

    async def check() -> None:
        connection, wire = Connection(BYTES_MAX), Clogged()
        connection.connection_made(wire)
        connection.pause_writing()
        if ends_by_itself:
            closed_by_the_other_side(connection, wire)
        else:
            put(connection, HEAD.pack(0, 255), [5])
            with pytest.raises(BadFrame):
                await connection.receive()
        async with asyncio.timeout(10 * QUIET_SECONDS):
            with pytest.raises(CannotConnect, match="took nothing"):
                await connection.send(Kind.REFUSED, (b"why",))
        assert wire.is_aborted

    on_virtual_time(check())


def test_who_is_no_longer_listened_to_and_takes_what_comes_is_not_lost() -> None:
    async def check() -> None:
        connection, _ = standing()
        connection.eof_received()
        await asyncio.sleep(10 * QUIET_SECONDS)
        assert not connection.is_lost

    on_virtual_time(check())


@pytest.mark.parametrize("is_full", [False, True])
def test_a_connection_ends_within_five_seconds_of_its_certificate(is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However seldom it is asked for a heartbeat, and also where nothing is read of it."""

    async def check() -> None:
        connection, wire = Connection(BYTES_MAX, quiet_seconds=100), Wire()
        connection.connection_made(wire)
        ends = asyncio.get_running_loop().time() + 8.5
        monkeypatch.setattr("waltzd.wire.frames.certificate_of", lambda side: None)
        tls: Any = type("Tls", (), {})()
        tls.refusal = lambda found: None if asyncio.get_running_loop().time() < ends else "has ended"
        if is_full:
            put(connection, spelled([(Kind.CLIENT, bytes(WAITING_MAX))]), [1 << 16])
        assert connection.end_with_certificate(tls) is None
        await asyncio.sleep(8.4)
        assert not wire.is_over
        await asyncio.sleep(5)
        assert wire.is_over

    on_virtual_time(check())


@pytest.mark.parametrize("tells", [False, True])
def test_an_end_that_is_full_says_that_it_lives_where_it_should(tells: bool) -> None:
    """A mount that waits for a majority of storages does not read, and is not lost by that."""

    async def check() -> None:
        connection, wire = Connection(BYTES_MAX, tells_when_full=tells), Wire()
        connection.connection_made(wire)
        put(connection, spelled([(Kind.CLIENT, bytes(WAITING_MAX))]), [1 << 16])
        assert not wire.listens
        await asyncio.sleep(2.5 * QUIET_SECONDS)
        assert connection.quiet_seconds == 0, "nobody listens"
        assert bytes(wire.written) == (HEAD.pack(0, Kind.ALIVE) * 2 if tells else b"")
        assert not wire.is_over

    on_virtual_time(check())


def test_whoever_answers_speaks_frames() -> None:
    async def check() -> None:
        connection, wire = standing()
        asking = asyncio.create_task(connection.answered())
        await asyncio.sleep(0)
        assert bytes(wire.written) == HEAD.pack(0, Kind.ASKED)
        assert not asking.done()
        put(connection, HEAD.pack(0, Kind.ALIVE), [5])
        await asking
        for end in (connection.eof_received, lambda: connection.lose(CannotConnect("gone"))):
            asking = asyncio.create_task(connection.answered())
            await asyncio.sleep(0)
            end()
            with pytest.raises(CannotConnect):
                await asking

    on_virtual_time(check())


def test_who_is_asked_answers_by_itself() -> None:
    async def check() -> None:
        connection, wire = standing()
        put(connection, HEAD.pack(0, Kind.ASKED), [2])
        assert bytes(wire.written) == HEAD.pack(0, Kind.ALIVE)
        connection.close()

    run(check())


# -- what the frames say -----------------------------------------------------------------------------------------------


@given(st.integers(0, 1 << 40), st.lists(st.binary(max_size=50), min_size=1, max_size=20), st.integers(-1, 1 << 40))
def test_records_travel_as_they_are(first_id: int, payloads: list[bytes], committed: int) -> None:
    run_ = encode_payloads(first_id, payloads)
    frame = records_of(b"".join(records_parts(run_, committed)))
    [found] = frame.runs
    assert (found.first_id, bytes(found.data), frame.committed) == (first_id, bytes(run_.data), committed)
    assert found.bounds.tolist() == run_.bounds.tolist()


BATCHES = st.lists(st.lists(st.binary(max_size=50), min_size=1, max_size=5), max_size=4)


@given(BATCHES, st.integers(-1, 1 << 40))
def test_batches_travel_as_they_are(payloads: list[list[bytes]], committed: int) -> None:
    sent = encoded_batches(payloads)
    frame = batches_of(b"".join(batches_parts(sent, committed)))
    assert frame.committed == committed
    assert [type(piece) for piece in frame.pieces] == [Batch] * len(sent)
    assert all(one.is_same_as(two) for one, two in zip(frame.pieces, sent, strict=True))  # type: ignore[union-attr]
    assert (frame.records, frame.bytes) == (sum(map(len, sent)), sum(batch.size for batch in sent))


@given(BATCHES, st.data())
def test_batches_that_were_changed_are_refused_or_found_wrong(payloads: list[list[bytes]], data: st.DataObject) -> None:
    raw = bytearray(b"".join(batches_parts(encoded_batches(payloads), 7)))
    at = data.draw(st.integers(8, len(raw) - 1))  # in front of that is the mark
    raw[at] ^= data.draw(st.integers(1, 255))
    try:
        frame = batches_of(raw[: data.draw(st.integers(len(raw) - 1, len(raw)))])
    except BadFrame:
        return
    assert any(why_wrong(batch) for batch in frame.pieces if isinstance(batch, Batch))


@given(st.binary(max_size=200))
def test_any_bytes_are_records_or_refused(raw: bytes) -> None:
    for read in (records_of, batches_of, mark_of, Hello.decode):
        try:
            read(raw)
        except BadFrame:
            continue
    unpacked_error(raw)


def test_callers_marks_and_refusals_travel() -> None:
    hello = Hello(UUID(int=5), 3, 77, Contact(2, bytes(range(32))), "s1", 1 << 40, 9)
    assert Hello.decode(hello.encode()) == hello
    assert str(bytes(range(32))) not in repr(hello), "a secret stands in no log"
    assert mark_of(mark_bytes(-1)) == -1
    back = unpacked_error(packed_error(NoSuchPartition("there is none")))
    assert (type(back), back.message) == (NoSuchPartition, "there is none")
    with pytest.raises(BadFrame, match="version"):
        Hello.decode(b"\x09" + hello.encode()[1:])


def test_two_real_connections_talk() -> None:
    async def check() -> None:
        near, far = socket.socketpair()
        loop = asyncio.get_running_loop()
        _, one = await loop.create_connection(lambda: Connection(BYTES_MAX), sock=near)
        _, other = await loop.create_connection(lambda: Connection(BYTES_MAX), sock=far)
        large = random.Random(1).randbytes(3_000_000)
        sending = asyncio.create_task(one.send(Kind.RECORDS, (large,)))
        found = await other.receive()
        assert found is not None
        assert bytes(found[1]) == large
        await sending
        other.close()
        assert await one.receive() is None
        one.close()

    run(check())


# -- what is heard as it comes -----------------------------------------------------------------------------------------


def test_what_is_heard_overtakes_nothing_that_waits_to_be_received() -> None:
    async def test() -> None:
        connection, _ = standing()
        heard: list[Buffer] = []
        put(connection, spelled([(Kind.MARK, b"1")]), [100])
        connection.hear(Kind.MARK, heard.append)
        put(connection, spelled([(Kind.MARK, b"2")]), [100])
        assert [await connection.receive() for _ in range(2)] == [(Kind.MARK, b"1"), (Kind.MARK, b"2")]
        put(connection, spelled([(Kind.MARK, b"3"), (Kind.REFUSED, b"4"), (Kind.MARK, b"5")]), [100])
        assert heard == [b"3"]
        assert [await connection.receive() for _ in range(2)] == [(Kind.REFUSED, b"4"), (Kind.MARK, b"5")]
        connection.close()

    asyncio.run(test())


def test_a_frame_that_its_taker_declines_is_received_and_those_behind_it() -> None:
    async def test() -> None:
        connection, _ = standing()
        heard: list[Buffer] = []

        def take(content: Buffer) -> bool:
            heard.append(content)
            return content != b"2"

        connection.hear(Kind.MARK, take)
        put(connection, spelled([(Kind.MARK, b"1"), (Kind.MARK, b"2"), (Kind.MARK, b"3")]), [100])
        assert heard == [b"1", b"2"]
        assert [await connection.receive() for _ in range(2)] == [(Kind.MARK, b"2"), (Kind.MARK, b"3")]
        connection.close()

    asyncio.run(test())


def test_what_a_taker_raises_is_received_and_it_hears_no_more() -> None:
    async def test() -> None:
        connection, _ = standing()
        heard: list[Buffer] = []

        def take(content: Buffer) -> None:
            heard.append(content)
            raise BadFrame("nonsense")

        connection.hear(Kind.MARK, take)
        put(connection, spelled([(Kind.MARK, b"1"), (Kind.MARK, b"2")]), [100])
        assert heard == [b"1"]
        connection._frames.clear()
        with pytest.raises(BadFrame, match="nonsense"):
            await connection.receive()
        connection.close()

    asyncio.run(test())


def test_nothing_is_heard_of_a_connection_that_was_given_up() -> None:
    async def test() -> None:
        connection, _ = standing()
        heard: list[Buffer] = []

        def take(content: Buffer) -> None:
            heard.append(content)
            connection.lose(CannotConnect("given up"))

        connection.hear(Kind.MARK, take)
        put(connection, spelled([(Kind.MARK, b"1"), (Kind.MARK, b"2")]), [100])
        assert heard == [b"1"]

    asyncio.run(test())


def test_a_large_frame_is_not_kept_behind_its_taking() -> None:
    async def test() -> None:
        connection, _ = standing()
        put(connection, spelled([(Kind.RECORDS, bytes(2 * SMALL_BYTES))]), [SMALL_BYTES])
        assert await connection.receive() == (Kind.RECORDS, bytes(2 * SMALL_BYTES))
        assert len(connection._large_view) == 0
        connection.close()

    asyncio.run(test())
