"""A server of a cluster in this process, for a client on any event loop: calls go to the loop of the cluster and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from waltzd.format.record import Run
from waltzd.protocol.batches import INTRODUCTION, ClientFrame, Introduction, Registration, ServerFrame, Topology
from waltzd.testing.server_port import DirectMount, ServerPort
from waltzd.wire.tasks import on_loop


class LoopPort:
    def __init__(self, port: ServerPort, loop: asyncio.AbstractEventLoop | None) -> None:
        self._port = port
        self._loop = loop

    def expect(self, name: str | None, streams: str = "") -> None:
        self._port.expect(name, streams)

    async def locate(self) -> Topology:
        return await on_loop(self._loop, self._port.locate())

    async def register(self, introduction: Introduction = INTRODUCTION) -> Registration:
        return await on_loop(self._loop, self._port.register(introduction))

    def mount(self) -> LoopMount:
        return LoopMount(self._port.mount(), self._loop)

    async def high_water_mark(self, partition: int, *, confirmed: bool = False) -> int:
        return await on_loop(self._loop, self._port.high_water_mark(partition, confirmed=confirmed))

    async def find_time(self, partition: int, time: int) -> int:
        return await on_loop(self._loop, self._port.find_time(partition, time))

    async def fetch(
        self, partition: int, first_id: int, last_id: int | None = None, *, with_locks: bool = False
    ) -> AsyncGenerator[Run, None]:
        runs = self._port.fetch(partition, first_id, last_id, with_locks=with_locks)

        async def next_run() -> Run | None:
            return await anext(runs, None)

        try:
            while (run := await on_loop(self._loop, next_run())) is not None:
                yield run
        finally:
            await on_loop(self._loop, _close(runs))

    async def close(self) -> None:
        await on_loop(self._loop, self._port.close())


async def _close(runs: AsyncGenerator[Run, None]) -> None:
    await runs.aclose()


class LoopMount:
    def __init__(self, mount: DirectMount, loop: asyncio.AbstractEventLoop | None) -> None:
        self._mount = mount
        self._loop = loop

    async def send(self, frames: Sequence[ClientFrame]) -> None:
        await on_loop(self._loop, self._mount.send(frames))

    @property
    def may_post(self) -> bool:
        return False  # the other loop has to have its turn

    def post(self, frames: Sequence[ClientFrame]) -> None:
        raise AssertionError("it may not")

    def hear(self, taker: Callable[[Sequence[ServerFrame]], None]) -> None:
        """All of them are received."""

    async def receive(self) -> Sequence[ServerFrame] | None:
        return await on_loop(self._loop, self._mount.receive())

    def cancel(self) -> None:
        if self._loop is None or self._loop is asyncio.get_running_loop():
            self._mount.cancel()
        else:
            self._loop.call_soon_threadsafe(self._mount.cancel)
