"""A port that accepts by itself: how many handshakes may be unfinished, and whose ends for a new one."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import pytest
import uvloop

from tests.process.certificates import Authority, Files
from waltzd.daemon import http
from waltzd.daemon.http import Answer, HttpPort, Question
from waltzd.errors import CannotConnect
from waltzd.protocol.address import Address
from waltzd.protocol.role import Role, dns_name
from waltzd.wire import listening_port
from waltzd.wire.frames import Connection
from waltzd.wire.listening_port import FramedListener, ListeningPort

KEY = UUID(int=7)
MOST = 8
LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
Run = Callable[[Any], None]


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(b"hello")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Authority(tmp_path).issue(KEY, Role.SERVER, "one")


def calling(files: Files) -> dict[str, Any]:
    return {"ssl": files.tls(Role.SERVER).calling(), "server_hostname": dns_name(KEY, Role.SERVER)}


@asynccontextmanager
async def opened(files: Files, most: int = MOST, seconds: float = 30.0) -> AsyncIterator[ListeningPort]:
    port = ListeningPort(Greeter, handshake_seconds=seconds, handshakes_max=most)
    await port.open("127.0.0.1", 0, files.tls(Role.SERVER).answering())
    try:
        async with asyncio.timeout(60):
            yield port
    finally:
        port.close()


class Silent:
    """Connections that never say anything."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.ended: list[int] = []
        """Connections that were closed by the port, by the order in which they were made."""
        self._writers: list[asyncio.StreamWriter] = []
        self._readers: list[asyncio.Task[None]] = []

    async def hold(self, count: int, host: str) -> None:
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._number, local_addr=(host, 0))
            self._readers.append(asyncio.create_task(self._drain(reader, len(self._writers))))
            self._writers.append(writer)

    async def _drain(self, reader: asyncio.StreamReader, number: int) -> None:
        with suppress(OSError):
            await reader.read()
        self.ended.append(number)

    async def until_ended(self, count: int) -> None:
        while len(self.ended) < count:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._readers)


async def greeted(files: Files, number: int, host: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", number, local_addr=(host, 0), **calling(files))
    try:
        return await reader.readexactly(5)
    finally:
        writer.transport.abort()


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


@LOOPS
def test_unfinished_handshakes_are_bounded_and_who_has_the_most_gives_up_the_oldest(run: Run, files: Files) -> None:
    async def test() -> None:
        async with opened(files) as port:
            before = descriptors()
            silent = Silent(port.number)
            await silent.hold(2, "127.0.0.2")
            await silent.hold(5 * MOST, "127.0.0.3")
            await silent.until_ended(4 * MOST + 2)
            assert sorted(silent.ended) == list(range(2, 4 * MOST + 4)), "the two of the other address stay"
            ours = 5 * MOST + 2
            assert descriptors() - before <= ours + MOST
            assert [await greeted(files, port.number, f"127.0.0.{host}") for host in (3, 4)] == [b"hello"] * 2
            await silent.close()

    run(test())


@LOOPS
def test_a_finished_handshake_does_not_count(run: Run, files: Files) -> None:
    async def test() -> None:
        async with opened(files, most=1) as port:
            held = []
            for _ in range(3):
                held.append(await asyncio.open_connection("127.0.0.1", port.number, **calling(files)))
                assert await held[-1][0].readexactly(5) == b"hello"
            for _, writer in held:
                assert not writer.is_closing()
                writer.transport.abort()

    run(test())


@LOOPS
def test_many_that_shake_hands_at_once_all_get_in(run: Run, files: Files) -> None:
    async def test() -> None:
        async with opened(files, most=64) as port:
            assert await asyncio.gather(*(greeted(files, port.number, "127.0.0.2") for _ in range(60))) == [b"hello"] * 60

    run(test())


@LOOPS
def test_refused_and_slow_handshakes_give_their_place_back(run: Run, files: Files, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "other").issue(KEY, Role.SERVER, "one")

    async def test() -> None:
        async with opened(files, most=2, seconds=0.2) as port:
            before = descriptors()
            for _ in range(4):
                with pytest.raises(OSError):  # noqa: PT011  whatever the loop makes of it
                    await greeted(stranger, port.number, "127.0.0.2")
            silent = Silent(port.number)
            await silent.hold(2, "127.0.0.2")
            await silent.until_ended(2)
            await silent.close()
            while descriptors() > before:
                await asyncio.sleep(0.01)
            assert await greeted(files, port.number, "127.0.0.2") == b"hello"

    run(test())


@LOOPS
def test_without_descriptors_the_port_pauses_and_goes_on(run: Run, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, refused = socket.socket.accept, 0

    def accept_later(one: socket.socket) -> Any:
        nonlocal refused
        refused += 1
        if refused == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(one)

    monkeypatch.setattr(listening_port, "PAUSE_SECONDS", 0.01)

    async def test() -> None:
        async with opened(files) as port:
            monkeypatch.setattr(socket.socket, "accept", accept_later)
            assert await greeted(files, port.number, "127.0.0.2") == b"hello"

    run(test())


@LOOPS
def test_a_closed_port_leaves_nothing_open(run: Run, files: Files) -> None:
    async def test() -> None:
        async with opened(files) as port:
            silent = Silent(port.number)
            await silent.hold(MOST, "127.0.0.2")
            port.close()
            await silent.until_ended(MOST)
            await silent.close()
            with pytest.raises(ConnectionRefusedError):
                await greeted(files, port.number, "127.0.0.2")

    run(test())


async def framed(files: Files) -> tuple[int, Callable[[], Awaitable[None]]]:
    async def serve(connection: Connection) -> None:
        connection.lose(CannotConnect("served"))

    port = FramedListener(
        Address("127.0.0.1", 0), files.tls(Role.SERVER),
        make_connection=lambda accept: Connection(1 << 20, accept), serve=serve, purpose="a test", busy="busy",
    )  # fmt: skip
    await port.open()
    port.begin(lambda error: None)
    return port.address.port, lambda: port.stop(0)


async def watched(files: Files) -> tuple[int, Callable[[], Awaitable[None]]]:
    async def page(_: Question) -> Answer:
        return Answer.text(200, "page")

    port = HttpPort(Address("127.0.0.1", 0), {"/": page}, files.tls(Role.SERVER).showing())
    await port.start()
    return port.address.port, port.stop


@pytest.mark.parametrize("make", [framed, watched])
def test_every_tls_port_bounds_handshakes(
    make: Callable[[Files], Awaitable[tuple[int, Callable[[], Awaitable[None]]]]],
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 2 * MOST

    async def test() -> None:
        number, stop = await make(files)
        silent = Silent(number)
        async with asyncio.timeout(60):
            await silent.hold(listening_port.HANDSHAKES_MAX + most, "127.0.0.2")
            await silent.until_ended(most)
            assert sorted(silent.ended) == list(range(most))
            await stop()
            await silent.close()

    assert min(listening_port.HANDSHAKE_SECONDS, http.QUESTION_SECONDS) == 5.0
    monkeypatch.setattr(listening_port, "HANDSHAKE_SECONDS", 60.0)
    monkeypatch.setattr(http, "QUESTION_SECONDS", 60.0)
    uvloop.run(test())
