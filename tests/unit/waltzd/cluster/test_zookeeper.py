"""The thread that speaks with ZooKeeper is silent when the loop that does the work stands."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from waltzd.cluster.zookeeper import LoopBeat, _Threads


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_loop_that_gave_no_beat_is_late() -> None:
    async def story() -> None:
        clock = Clock()
        beat = LoopBeat(0.2, clock)
        clock.now += 1000
        beat.check()  # nobody watches yet
        beat.start(asyncio.get_running_loop())
        clock.now += 0.15
        beat.check()
        clock.now += 0.15
        with pytest.raises(OSError, match=r"stood still for 0.3 seconds; 0.2 are allowed"):
            beat.check()
        while True:  # until the loop gives the next beat by itself
            await asyncio.sleep(0.01)
            try:
                beat.check()
            except OSError:
                continue
            break
        clock.now += 1000
        beat.stop()
        beat.check()

    async def bounded() -> None:
        async with asyncio.timeout(20):
            await story()

    asyncio.run(bounded())


def test_nothing_is_read_written_or_connected_for_a_loop_that_stands() -> None:
    clock = Clock()
    beat = LoopBeat(2.0, clock)
    threads = _Threads(None, beat, ended=lambda: None, forget=lambda: None, session_seconds=6.0)
    one, other = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, one, other:
        address = server.getsockname()
        threads.create_connection(address, "localhost", 5.0).close()
        assert threads.select([], [one], [], 0)[1] == [one]
        beat._at = clock.now
        clock.now += 2.1
        for readers, writers in (([], [one]), ([one], []), ([one], [one])):
            with pytest.raises(OSError, match="stood still"):
                threads.select(readers, writers, [], 0)
        with pytest.raises(OSError, match="stood still"):
            threads.create_connection(address, "localhost", 5.0)
        beat._at = clock.now
        assert threads.select([], [one], [], 0)[1] == [one]


def test_requests_that_nobody_sends_block_nobody() -> None:
    """A loop asks for hundreds of partitions at once. What kazoo uses by itself is full after 278 requests."""
    threads = _Threads(None, LoopBeat(2.0), ended=lambda: None, forget=lambda: None, session_seconds=6.0)
    reader, writer = threads.create_socket_pair()

    def ask() -> None:
        for _ in range(10_000):
            writer.send(b"\0")

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(20)
    assert not asking.is_alive()
    for _ in range(10_000):
        assert threads.select([reader], [], [], 0)[0] == [reader]
        assert reader.recv(1) == b"\0"
    assert threads.select([reader], [], [], 0)[0] == []
    writer.send(b"\0")
    assert threads.select([reader], [], [], 0)[0] == [reader]
    writer.close()
    reader.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        writer.send(b"\0")
