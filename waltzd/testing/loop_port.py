"""A server of a cluster in this process, for a client on any event loop: calls go to the loop of the cluster and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Generic
from uuid import UUID

from waltzd.cluster.groups import GroupMeta, MadeGroup
from waltzd.format.record import Run
from waltzd.protocol.batches import INTRODUCTION, ClientFrame, Introduction, Registration, ServerFrame, Topology
from waltzd.protocol.groups import DeliveryFrame, MemberFrame
from waltzd.protocol.positions import Position
from waltzd.testing.server_port import DirectStream, Down, ServerPort, Up
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

    def attend(self) -> LoopAttend:
        return LoopAttend(self._port.attend(), self._loop)

    async def make_group(self, meta: GroupMeta) -> MadeGroup:
        return await on_loop(self._loop, self._port.make_group(meta))

    async def get_group(self, name: str) -> MadeGroup:
        return await on_loop(self._loop, self._port.get_group(name))

    async def high_water_mark(self, partition: int, *, confirmed: bool = False, since: Position | None = None) -> Position:
        return await on_loop(self._loop, self._port.high_water_mark(partition, confirmed=confirmed, since=since))

    async def find_time(self, partition: int, time: int) -> Position:
        return await on_loop(self._loop, self._port.find_time(partition, time))

    async def fetch(
        self,
        partition: int,
        first_id: int,
        last_id: int | None = None,
        *,
        with_locks: bool = False,
        timeline: UUID | None = None,
    ) -> AsyncGenerator[Run, None]:
        runs = self._port.fetch(partition, first_id, last_id, with_locks=with_locks, timeline=timeline)

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


class _LoopStream(Generic[Up, Down]):
    def __init__(self, stream: DirectStream[Up, Down], loop: asyncio.AbstractEventLoop | None) -> None:
        self._stream = stream
        self._loop = loop

    async def send(self, frames: Sequence[Up]) -> None:
        await on_loop(self._loop, self._stream.send(frames))

    async def receive(self) -> Sequence[Down] | None:
        return await on_loop(self._loop, self._stream.receive())

    def cancel(self) -> None:
        if self._loop is None or self._loop is asyncio.get_running_loop():
            self._stream.cancel()
        else:
            self._loop.call_soon_threadsafe(self._stream.cancel)


class LoopMount(_LoopStream[ClientFrame, ServerFrame]):
    @property
    def may_post(self) -> bool:
        return False  # the other loop has to have its turn

    def post(self, frames: Sequence[ClientFrame]) -> None:
        raise AssertionError("it may not")

    def hear(self, taker: Callable[[Sequence[ServerFrame]], None]) -> None:
        """All of them are received."""


class LoopAttend(_LoopStream[MemberFrame, DeliveryFrame]):
    """The stream of a member."""
