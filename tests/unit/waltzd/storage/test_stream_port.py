"""The port of append streams: how many it takes, and that none outlives it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.batches import batches_of
from tests.simulation.sample import KEY, begin, blank_disk, open_directory, run_for
from tests.unit.keeping import CONFIG, with_calls
from waltzd.client.loop import LoopThread
from waltzd.errors import CannotConnect
from waltzd.errors.operations import StaleSession
from waltzd.protocol.address import Address
from waltzd.protocol.peers import Contact
from waltzd.storage.calls import StorageCalls
from waltzd.storage.stream_port import StreamPort
from waltzd.wire.storages import AppendStream
from waltzd.wire.streams import Hello
from waltzd.wire.tasks import on_loop

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
        while port._listener._serving:
            await asyncio.sleep(0.001)
        third = opened()
        assert await append(third, 5) == 5
        third.cancel()

    with_port(1, test)


def test_one_address_leaves_a_fifth_of_the_streams_to_others() -> None:
    async def test(port: StreamPort, opened: Opened) -> None:
        held = [opened() for _ in range(4)]
        for stream in held:
            assert await append(stream, 3) == 3
        with pytest.raises(CannotConnect):
            await append(opened(), 3)
        assert port._listener._shares.take("another address")
        for stream in held:
            stream.cancel()

    with_port(5, test)


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


def test_while_a_flush_hangs_on_the_loop_of_streams_everybody_else_is_answered() -> None:
    """And an opening waits for its turn: what was being written is acknowledged before it, and nothing after it."""
    disk = blank_disk()
    directory = open_directory(disk)
    begin(directory, 0, records=3)
    disk.kill()
    failed: list[BaseException] = []
    begun, may_end = threading.Event(), threading.Event()
    may_end.set()

    def hang(function: Callable[..., Any], *arguments: Any) -> Any:
        begun.set()
        assert may_end.wait(10)
        return function(*arguments)

    async def on_a_thread(function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(function, *arguments)

    async def run() -> None:
        loop = LoopThread("streams").loop
        calls = StorageCalls(
            disk, open_directory(disk), CONFIG,
            run_writing=on_a_thread, run_reading=on_a_thread, on_fatal=failed.append, run_here=hang, streams_loop=loop,
        )  # fmt: skip
        calls.start()
        await calls.open_session(0, 2, 3, secret=SECRET)
        port = StreamPort(calls, Address("127.0.0.1", 0), None)
        await on_loop(loop, port.start(failed.append))
        stream = AppendStream("127.0.0.1", port.address.port, Hello(KEY, 0, 2, Contact(secret=SECRET)), tls=None, name=None)
        assert await append(stream, 3) == 3
        await calls.set_low_mark(0, 2, 3, contact=Contact(secret=SECRET))
        while calls._queues[0]._has_work:
            await asyncio.sleep(0.001)
        begun.clear()
        may_end.clear()
        await stream.send(run_for(0, 4, 1), 3)
        await asyncio.to_thread(begun.wait, 10)
        assert (calls.status(0).last_id, calls.quiet([0])) == (3, [])
        assert (await calls.describe()).assigned[0].status is not None
        opening = asyncio.ensure_future(calls.open_session(0, 3, 3))
        await asyncio.sleep(0.01)
        assert not opening.done()
        may_end.set()
        assert (await opening).last_id == 4
        assert await stream.receive() == 4
        with pytest.raises(StaleSession):
            await append(stream, 5)
        assert (calls.status(0).last_id, calls.statistics.groups) == (4, 2)
        await on_loop(loop, port.stop(1))
        await calls.close()

    asyncio.run(run())
    assert failed == []
