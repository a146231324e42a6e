"""A load: producers that hand over transactions and wait for them, or all of them keep to a rate, answered or not.

With a rate, a latency counts from when the transaction was due: when a log stands still for a second, all transactions of
that second have waited, and not only the few that were under way. Payloads are random bytes, because real ones seldom
compress; a few of them are used again and again, so that making them is not measured.

A latency is counted in one of some thousand buckets whose width grows with the value, so every percentile is right to
within one part in a hundred, however long a run is and however many producers it has.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from waltzd.client.client import Client
from waltzd.client.pending import IS_COMMITTED, IS_UNKNOWN, Outcomes
from waltzd.client.settings import ClientSettings
from waltzd.errors import BadArgument
from waltzd.protocol.locks import AppendOutcome, Committed, Lock, Mode, Reason, Rejected

LOCK_NAME = "bench"
PAYLOADS_BYTES = 4 << 20
"""Bytes of payloads that are made before a run."""
SHOW_SECONDS = 0.25
WAITING_MAX = 100_000
"""Limit of transactions that are due and not answered. Above it the rate is not kept; the delay counts as latency."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Load:
    size: int = 512
    """Bytes of a payload."""
    partitions: int = 0
    """Number of partitions, used in turn; set by `on`."""
    producers: int = 64
    batch: int = 1
    """Transactions that a producer hands over at once and waits for."""
    locks: int = 1
    keys: int = 100_000
    """Number of different locks, which transactions use in turn."""
    rate: float | None = None
    """Transactions a second, whether or not earlier ones are answered. None: each producer waits for its answer."""
    seconds: float | None = 10.0
    count: int | None = None
    """Number of transactions, in place of `seconds`."""
    warm_up: float = 1.0
    """Seconds before anything is counted; unused with `count`."""

    def on(self, partitions: int) -> Load:
        """Return this load for a number of partitions; raise `BadArgument` for options that contradict each other."""
        if self.locks > self.keys:
            raise BadArgument(f"a transaction cannot have {self.locks} different locks out of {self.keys}")
        if (self.seconds is None) == (self.count is None):
            raise BadArgument("give either the seconds or the number of transactions")
        return replace(self, partitions=partitions)

    def client_settings(self) -> ClientSettings:
        """Return settings with room for all that is in flight: the cluster is measured, not the client's bounds."""
        rows = 2 * self.producers * self.batch if self.rate is None else WAITING_MAX + self.batch
        return ClientSettings(pending_max=max(20_000, rows), pending_bytes_max=max(32 << 20, rows * (self.size + 256)))


class Cycle(Generic[T]):
    """Repeats a few values in turn."""

    def __init__(self, values: Sequence[T]) -> None:
        self._values = values
        self._next = 0

    def take(self, count: int) -> list[T]:
        out: list[T] = []
        while len(out) < count:
            part = self._values[self._next : self._next + count - len(out)]
            self._next = (self._next + len(part)) % len(self._values)
            out += part
        return out


def payloads(size: int) -> Cycle[bytes]:
    count = max(1, min(1024, PAYLOADS_BYTES // max(1, size)))
    raw = np.random.default_rng(1).bytes(count * size)
    return Cycle([raw[at * size : (at + 1) * size] for at in range(count)])


def locks(each: int, keys: int) -> Cycle[tuple[Lock, ...]]:
    """Return locks for transaction after transaction; no two share one as long as there are keys left."""
    if each == 0:
        return Cycle([()])
    pool = [Lock(LOCK_NAME, key, Mode.WRITE) for key in range(keys)]
    return Cycle([tuple(pool[at : at + each]) for at in range(0, keys - each + 1, each)])


class Drive:
    """One load on one cluster, once."""

    def __init__(self, client: Client, load: Load, report: Callable[[str], None]) -> None:
        """Create a load; `report` is called regularly with the present rate."""
        self.counters = Counters()
        self._client = client
        self._load = load
        self._report = report
        self._payloads = payloads(load.size)
        self._locks = locks(load.locks, load.keys)
        self._left = load.count
        self._is_over = False
        self._turns = 0

    async def run(self) -> Counters:
        """Return what was counted after the warm-up, once the load is done and everything is answered."""
        for partition in range(self._load.partitions):  # every partition has an owner before any clock runs
            await self._client.end_position(partition)
        self.counters.begin(time.perf_counter())
        work = asyncio.create_task(self._work())
        showing = asyncio.create_task(self._show())
        try:
            if self._load.seconds is not None:
                await _span(work, self._load.warm_up)
                self.counters.begin(time.perf_counter())
                await _span(work, self._load.seconds)
                self.counters.end(time.perf_counter())
                self._is_over = True
                await work
            else:
                await work
                self.counters.end(time.perf_counter())
        finally:
            self._is_over = True
            for task in (showing, work):
                task.cancel()
            await asyncio.gather(showing, work, return_exceptions=True)
        return self.counters

    async def _show(self) -> None:
        while True:
            before = self.counters.committed
            await asyncio.sleep(SHOW_SECONDS)
            self._report(f"{max(0, self.counters.committed - before) / SHOW_SECONDS:,.0f} transactions a second")

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
                due_time = begun + due / rate
                if (early := due_time - time.perf_counter()) > 0:
                    await asyncio.sleep(early)
                await room.acquire()
                handing.create_task(hand_over(*turn, due_time))

    def _next_turn(self) -> tuple[int, int] | None:
        """Return the partition of the next call and its number of transactions; None at the end of the load."""
        count = self._load.batch if self._left is None else min(self._load.batch, self._left)
        if self._is_over or count == 0:
            return None
        if self._left is not None:
            self._left -= count
        partition, self._turns = self._turns % self._load.partitions, self._turns + 1
        return partition, count

    async def _hand_over(self, partition: int, count: int, since: float) -> None:
        client = self._client
        data, wanted = self._payloads.take(count), self._locks.take(count)
        mark = client.position(partition)
        if count == 1:
            outcome = await client.append(data[0], partition=partition, locks=wanted[0], position=mark)
            self.counters.one(outcome, time.perf_counter() - since)
        else:
            given = wanted if self._load.locks else None
            outcomes = await client.append_many(data, partition=partition, locks=given, position=mark)
            self.counters.many(outcomes, time.perf_counter() - since)


async def _span(work: asyncio.Task[None], seconds: float) -> None:
    """Wait for `seconds`, or raise what `work` failed with."""
    await asyncio.wait([work], timeout=seconds)
    if work.done():
        work.result()


# -- what is counted ---------------------------------------------------------------------------------------------------


LEAST_SECONDS = 1e-6
STEPS = 128
"""Buckets for each doubling."""
DOUBLINGS = 32
"""From one microsecond to more than an hour; a longer time counts as that."""
PERCENTILES = (50.0, 99.0, 99.9)


class Latencies:
    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(STEPS * DOUBLINGS, np.int64)
        self.count = 0
        self.highest = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count `times` transactions that took `seconds` each."""
        bucket = int(np.log2(seconds / LEAST_SECONDS) * STEPS) if seconds > LEAST_SECONDS else 0
        self._counts[min(bucket, STEPS * DOUBLINGS - 1)] += times
        self.count += times
        self.highest = max(self.highest, seconds)

    def merge(self, other: Latencies) -> None:
        """Add what `other` has counted."""
        self._counts += other._counts
        self.count += other.count
        self.highest = max(self.highest, other.highest)

    def percentile(self, percent: float) -> float:
        """Return the time within which at least `percent` of a hundred ended; 0 when nothing was counted."""
        if self.count == 0:
            return 0.0
        rank = max(1, int(np.ceil(self.count * percent / 100)))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(LEAST_SECONDS * float(2.0 ** ((bucket + 1) / STEPS)), self.highest)


class Counters:
    """Outcomes of one load. `begin` drops what was counted during the warm-up."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Length of the measurement, once `end` was called."""
        self.begin(0.0)

    def begin(self, now: float) -> None:
        self.committed = 0
        self.refused: Counter[str] = Counter()
        """Rejected transactions, by reason."""
        self.unknown = 0
        self.latencies = Latencies()
        self._begun = now

    def end(self, now: float) -> None:
        self.seconds = now - self._begun

    @property
    def attempts(self) -> int:
        return self.committed + self.refused.total() + self.unknown

    def one(self, outcome: AppendOutcome, seconds: float) -> None:
        match outcome:
            case Committed():
                self._commit(1, seconds)
            case Rejected(reason):
                self.refused[reason.name] += 1
            case _:
                self.unknown += 1

    def many(self, outcomes: Outcomes, seconds: float) -> None:
        """Count a batch, which was handed over and answered as one."""
        self._commit(outcomes.committed, seconds)
        if outcomes.committed < len(outcomes):
            for row in (outcomes.reasons != IS_COMMITTED).nonzero()[0].tolist():
                if outcomes.reasons[row] == IS_UNKNOWN:
                    self.unknown += 1
                else:
                    self.refused[Reason(int(outcomes.reasons[row])).name] += 1

    def _commit(self, count: int, seconds: float) -> None:
        if count:
            self.committed += count
            self.latencies.add(seconds, count)
