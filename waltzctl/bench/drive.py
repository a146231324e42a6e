"""Producers at work: each hands over transactions and waits, or all of them keep to a rate, answered or not.

With a rate, a latency counts from when the transaction was due: when a log stands still for a second, all transactions of
that second have waited, and not only the few that were under way.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable

from waltzctl.bench.counters import Counters
from waltzctl.bench.load import Load, Locks, Payloads, due_at
from waltzctl.bench.site import Site
from waltzd.client.client import Client
from waltzd.client.routes import Partitions
from waltzd.client.settings import ClientSettings
from waltzd.protocol.batches import FeedMode

LOOK_SECONDS = 0.25
WAITING_MAX = 100_000
"""Transactions that are due and not answered. Beyond that the rate is not kept, and what was due still counts as late."""
Watch = Callable[[Counters, float], None]
"""Called now and then with what was counted so far, and for how many seconds."""


STAMPED = 1
"""The header of transactions that say when they were handed over."""
_STAMP = struct.Struct(">d")
STAMP_BYTES = _STAMP.size


def stamped(payload: bytes) -> bytes:
    return _STAMP.pack(time.perf_counter()) + payload[_STAMP.size :]


def stamp_of(payload: bytes) -> float:
    return float(_STAMP.unpack_from(payload)[0])


def settings_for(load: Load) -> ClientSettings:
    """Room for all that the load keeps in flight: the cluster is measured, not the client's bounds."""
    rows = 2 * load.producers * load.batch if load.rate is None else WAITING_MAX + load.batch
    return ClientSettings(pending_max=max(20_000, rows), pending_bytes_max=max(32 << 20, rows * (load.size + 256)))


def open_client(site: Site, load: Load) -> Client:
    partitions: Partitions = range(load.partitions) if load.partitions else "all"
    return site.client(partitions, feed=FeedMode.NONE, settings=settings_for(load))


async def _nothing() -> None:
    pass


class Drive:
    """One load on one cluster, once."""

    def __init__(
        self, client: Client, load: Load, counters: Counters, *, watch: Watch | None = None, stamps: bool = False
    ) -> None:
        """`stamps`: the last transaction of each call says when it was handed over, for readers."""
        self._client = client
        self._load = load
        self._counters = counters
        self._watch = watch
        self._payloads = Payloads(load.size)
        self._locks = Locks(load)
        self._stamps = stamps
        self._left = load.count
        self._is_over = False
        self._turns = 0

    async def run(self, counting: Callable[[], Awaitable[None]] = _nothing) -> None:
        """Until the load is done and everything is answered. What comes after the warm-up is counted; `counting` is called
        before that begins."""
        await self._reach_all()
        if self._load.count is not None:
            await counting()
        self._counters.begin(time.perf_counter())
        work = asyncio.create_task(self._work())
        ticking = asyncio.create_task(self._tick())
        try:
            if self._load.count is None:
                await self._span(work, self._load.warm_up)
                await counting()
                self._counters.begin(time.perf_counter())
                assert self._load.seconds is not None
                await self._span(work, self._load.seconds)
                self._counters.end(time.perf_counter())
                self._is_over = True
                await work
            else:
                await work
                self._counters.end(time.perf_counter())
        finally:
            self._is_over = True
            for task in (ticking, work):
                task.cancel()
            await asyncio.gather(ticking, work, return_exceptions=True)

    async def _reach_all(self) -> None:
        """Every partition has an owner that answers, before any clock runs."""
        for partition in range(self._load.partitions):
            await self._client.end_position(partition)

    async def _span(self, work: asyncio.Task[None], seconds: float) -> None:
        """So long, or until the work fails."""
        await asyncio.wait([work], timeout=seconds)
        if work.done():
            work.result()

    async def _tick(self) -> None:
        begun = time.perf_counter()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.perf_counter()
            self._counters.tick(now)
            if self._watch is not None:
                self._watch(self._counters, now - begun)

    # -- who hands over what

    async def _work(self) -> None:
        if self._load.rate is not None:
            await self._keep_rate(self._load.rate)
        else:
            async with asyncio.TaskGroup() as producers:
                for _ in range(self._load.producers):
                    producers.create_task(self._produce())

    async def _produce(self) -> None:
        while (turn := self._next_turn()) is not None:
            await self._hand_over(*turn, time.perf_counter())

    async def _keep_rate(self, rate: float) -> None:
        begun, due = time.perf_counter(), 0
        room = asyncio.Semaphore(max(1, WAITING_MAX // self._load.batch))

        async def hand_over(partition: int, count: int, due_time: float) -> None:
            try:
                await self._hand_over(partition, count, due_time)
            finally:
                room.release()

        async with asyncio.TaskGroup() as handing:
            while (turn := self._next_turn()) is not None:
                due += turn[1]
                due_time = begun + due_at(due, rate)
                if (early := due_time - time.perf_counter()) > 0:
                    await asyncio.sleep(early)
                await room.acquire()
                handing.create_task(hand_over(*turn, due_time))

    def _next_turn(self) -> tuple[int, int] | None:
        """The partition of the next call and how many transactions it has; None at the end of the load."""
        count = self._load.batch if self._left is None else min(self._load.batch, self._left)
        if self._is_over or count == 0:
            return None
        if self._left is not None:
            self._left -= count
        partition, self._turns = self._turns % self._load.partitions, self._turns + 1
        return partition, count

    async def _hand_over(self, partition: int, count: int, since: float) -> None:
        client = self._client
        payloads, locks = self._payloads.take(count), self._locks.take(count)
        mark, last_header = client.position(partition), 0
        if self._stamps:
            payloads[-1], last_header = stamped(payloads[-1]), STAMPED
        if count == 1:
            outcome = await client.append(
                payloads[0], partition=partition, header=last_header, locks=locks[0], position=mark
            )
            self._counters.one(outcome, time.perf_counter() - since)
        else:
            headers = [0] * (count - 1) + [last_header] if self._stamps else None
            given = locks if self._load.locks else None
            outcomes = await client.append_many(payloads, partition=partition, headers=headers, locks=given, position=mark)
            self._counters.many(outcomes, time.perf_counter() - since)
