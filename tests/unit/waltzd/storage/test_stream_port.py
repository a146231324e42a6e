"""The port of append streams: how many it takes, and that none outlives it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.batches import batches_of
from tests.simulation.sample import KEY, begin, blank_disk, open_directory, run_for
from tests.unit.keeping import with_calls
from waltzd.errors import CannotConnect
from waltzd.protocol.address import Address
from waltzd.protocol.peers import Contact
from waltzd.storage.calls import StorageCalls
from waltzd.storage.stream_port import StreamPort
from waltzd.wire.storages import AppendStream
from waltzd.wire.streams import Hello

SECRET = bytes(range(32))
Opened = Callable[[], AppendStream]


def with_port(connections_max: int, test: Callable[[StreamPort, Opened], Coroutine[Any, Any, None]]) -> None:
    disk = blank_disk()
    directory = open_directory(disk)
    begin(directory, 0, records=3)
    disk.kill()
    failed: list[BaseException] = []

    async def run(calls: StorageCalls, _: list[str]) -> None:
        await calls.open_session(0, 2, 3, secret=SECRET)
        port = StreamPort(calls, Address("127.0.0.1", 0), None, connections_max=connections_max)
        await port.start(failed.append)
        try:
            hello = Hello(KEY, 0, 2, Contact(secret=SECRET))
            await test(port, lambda: AppendStream("127.0.0.1", port.address.port, hello, tls=None, name=None))
        finally:
            await port.stop(0)

    with_calls(disk, run)
    assert failed == []


async def append(stream: AppendStream, id_: int) -> int | None:
    await stream.send(run_for(0, id_, 1), -1)
    return await stream.receive()


def test_one_more_than_there_may_be_is_closed_and_the_others_go_on() -> None:
    async def test(port: StreamPort, opened: Opened) -> None:
        first, second = opened(), opened()
        assert await append(first, 3) == 3
        with pytest.raises(CannotConnect):
            await append(second, 4)
        assert await append(first, 4) == 4
        first.cancel()
        while port._serving:
            await asyncio.sleep(0.001)
        third = opened()
        assert await append(third, 5) == 5
        third.cancel()

    with_port(1, test)


def test_a_stream_that_does_not_end_in_time_is_ended_before_the_port_is_closed() -> None:
    async def test(port: StreamPort, opened: Opened) -> None:
        stream = opened()
        assert await append(stream, 3) == 3
        await port.stop(0.01)
        left = [task for task in asyncio.all_tasks() if "StreamPort" in getattr(task.get_coro(), "__qualname__", "")]
        assert left == []
        with pytest.raises(CannotConnect):
            await append(stream, 4)

    with_port(8, test)


def test_batches_come_in_whole_and_a_frame_without_any_is_not_acknowledged() -> None:
    async def test(port: StreamPort, opened: Opened) -> None:
        stream, log = opened(), batches_of([[b"a", b"b"], [b"c"], [b"d", b"e"]], first_id=3)
        await stream.send(tuple(log[:2]), -1)
        assert await stream.receive() == 5
        await stream.send((), 5)
        await stream.send(tuple(log[1:]), 5)  # one of them once more
        assert await stream.receive() == 7
        stream.cancel()

    with_port(2, test)
