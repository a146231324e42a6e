"""Segment files over a plain connection: whole, checked, never more than two pieces ahead of whoever takes them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from tests.simulation.loop import SimLoop
from waltzd.errors import CannotConnect
from waltzd.errors.operations import BadFrame, DiskFull
from waltzd.wire.codec import packed_error
from waltzd.wire.frames import FRAME_COST, WAITING_MAX, Connection, Kind
from waltzd.wire.streams import PIECE_BYTES, PIECES_AHEAD, FileSender, piece_parts, received, whole_bytes

CONTENT = random.Random(7).randbytes(3 * PIECE_BYTES + 17)


async def pair() -> tuple[Connection, Connection]:
    loop = asyncio.get_running_loop()
    ends = []
    for end in socket.socketpair():
        end.setblocking(False)
        _, connection = await loop.connect_accepted_socket(lambda: Connection(1 << 20), end)
        ends.append(connection)
    return ends[0], ends[1]


def run(test: Coroutine[Any, Any, None]) -> None:
    async def timely() -> None:
        async with asyncio.timeout(20):
            await test

    asyncio.run(timely())


async def cut(content: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(content), size):
        yield content[at : at + size]


async def taken(connection: Connection) -> bytes:
    async with aclosing(received(connection)) as pieces:
        return b"".join([bytes(piece) async for piece in pieces])


@pytest.mark.parametrize("size", [1000, PIECE_BYTES, PIECE_BYTES + 1, len(CONTENT)])
@pytest.mark.parametrize("content", [b"", b"x", CONTENT])
def test_a_file_arrives_as_it_was(content: bytes, size: int) -> None:
    async def test() -> None:
        here, there = await pair()
        sending = asyncio.create_task(FileSender(here, receiver="there").send(cut(content, size)))
        assert await taken(there) == content
        await there.send(Kind.STATUS, (b"thanks",))
        found = await sending
        assert found is not None
        assert (found[0], bytes(found[1])) == (Kind.STATUS, b"thanks")
        here.close()
        there.close()

    run(test())


def test_a_slow_receiver_has_two_pieces_before_it_and_still_listens() -> None:
    assert PIECES_AHEAD * (PIECE_BYTES + 2 * FRAME_COST) < WAITING_MAX

    async def test() -> None:
        here, there = await pair()
        asked: list[int] = []

        async def pieces() -> AsyncIterator[bytes]:
            for number in range(10):
                asked.append(number)
                yield bytes([number]) * PIECE_BYTES

        sending = asyncio.create_task(FileSender(here, receiver="there").send(pieces()))
        async with aclosing(received(there)) as found:
            for number in range(10):
                piece = await anext(found)
                assert bytes(piece[:1]) == bytes([number])
                for _ in range(50):
                    await asyncio.sleep(0)
                assert len(asked) <= number + 1 + PIECES_AHEAD
                assert not there._is_paused
            with pytest.raises(StopAsyncIteration):
                await anext(found)
        there.close()
        assert await sending is None
        here.close()

    run(test())


def test_no_piece_is_asked_for_before_the_receiver_agrees() -> None:
    async def test() -> None:
        here, there = await pair()

        async def pieces() -> AsyncIterator[bytes]:
            raise AssertionError
            yield b""

        sending = asyncio.create_task(FileSender(here, receiver="there").send(pieces()))
        await there.send(Kind.REFUSED, (packed_error(DiskFull("no room")),))
        found = await sending
        assert found is not None
        assert found[0] is Kind.REFUSED
        here.close()
        there.close()

    run(test())


def test_a_receiver_that_wants_no_more_is_heard_in_the_middle() -> None:
    async def test() -> None:
        here, there = await pair()

        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 1000

        sending = asyncio.create_task(FileSender(here, receiver="there").send(endless()))
        async with aclosing(received(there)) as found:
            await anext(found)
            await anext(found)
        await there.send(Kind.REFUSED, (packed_error(DiskFull("no room")),))
        answer = await sending
        assert answer is not None
        assert answer[0] is Kind.REFUSED
        here.close()
        there.close()

    run(test())


def test_a_source_that_fails_is_told_as_it_is() -> None:
    async def test() -> None:
        here, there = await pair()

        async def failing() -> AsyncIterator[bytes]:
            yield b"first"
            raise DiskFull("the source")

        sending = asyncio.create_task(FileSender(here, receiver="there").send(failing()))
        async with aclosing(received(there)) as found:
            assert bytes(await anext(found)) == b"first"
        with pytest.raises(DiskFull, match="the source"):
            await sending
        here.close()
        there.close()

    run(test())


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_sender_that_goes_is_noticed(is_lost: bool) -> None:
    async def test() -> None:
        here, there = await pair()
        sending = asyncio.create_task(FileSender(here, receiver="there").send(cut(CONTENT, 1000)))
        async with aclosing(received(there)) as found:
            await anext(found)
            go(here, is_lost)
            with pytest.raises((CannotConnect, BadFrame)):
                [piece async for piece in found]
        with pytest.raises(CannotConnect):
            await sending
        there.close()

    run(test())


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_receiver_that_goes_is_noticed(is_lost: bool) -> None:
    async def test() -> None:
        here, there = await pair()
        sending = asyncio.create_task(FileSender(here, receiver="there").send(cut(CONTENT, 1000)))
        async with aclosing(received(there)) as found:
            await anext(found)
        go(there, is_lost)
        with contextlib.suppress(CannotConnect):
            assert await sending is None
        here.close()

    run(test())


def go(connection: Connection, is_lost: bool) -> None:
    if is_lost:
        connection.lose(CannotConnect("gone"))
    else:
        connection.close()


class Silent(Connection):
    """Takes everything and says nothing, or gives leave once for all."""

    def __init__(self, leaves: int) -> None:
        super().__init__(1 << 20)
        self.sent: list[Kind] = []
        self._leaves = leaves

    async def send(self, kind: Kind, parts: Any = (), *, gather: bool = False) -> None:
        self.sent.append(kind)

    async def receive(self) -> tuple[Kind, bytes]:
        while not self._leaves:
            await asyncio.sleep(3600)
        self._leaves -= 1
        return Kind.GO_ON, b""


@pytest.mark.parametrize(("leaves", "sent"), [(0, []), (2, [Kind.PIECE] * 2), (4, [Kind.PIECE] * 3 + [Kind.WHOLE])])
def test_a_receiver_that_does_nothing_is_given_up(leaves: int, sent: list[Kind]) -> None:
    loop = SimLoop(steps_max=10_000)
    connection = Silent(leaves)
    try:
        with pytest.raises(CannotConnect, match="there took nothing of a segment file for 30 seconds"):
            loop.run_until_complete(FileSender(connection, receiver="there", seconds=30).send(cut(b"abc", 1)))
    finally:
        loop.close()
    assert connection.sent == sent


@pytest.mark.parametrize(
    "frames",
    [
        [(Kind.PIECE, b"".join(bytes(part) for part in piece_parts(1, b"x")))],
        [(Kind.PIECE, b"".join(bytes(part) for part in piece_parts(0, b"x"))[:-1] + b"y")],
        [(Kind.PIECE, b"")],
        [(Kind.PIECE, b"".join(bytes(part) for part in piece_parts(0, b"")))],
        [(Kind.PIECE, b"".join(bytes(part) for part in piece_parts(0, b"x"))), (Kind.WHOLE, whole_bytes(2))],
        [(Kind.WHOLE, b"")],
        [(Kind.MARK, b"12345678")],
    ],
)
def test_what_is_no_sound_file_is_refused(frames: list[tuple[Kind, bytes]]) -> None:
    async def test() -> None:
        here, there = await pair()
        for kind, content in frames:
            await here.send(kind, (content,))
        with pytest.raises(BadFrame):
            await taken(there)
        here.close()
        there.close()

    run(test())
