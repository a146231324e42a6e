"""`append`, `mixed` and `locks`: transactions that go in, alone, beside readers, or against each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from waltzctl.bench.drive import STAMPED, Drive, Watch, open_client, stamp_of
from waltzctl.bench.figures import Latencies
from waltzctl.bench.load import FILLING, Load, Locks, Payloads
from waltzctl.bench.machine import Machine
from waltzctl.bench.result import Result, Series
from waltzctl.bench.site import CLIENT, Reading, Site, flushes, processes
from waltzctl.bench.tally import Tally
from waltzd.client.client import Client
from waltzd.client.view import Builder, Declined, Transaction, TransactionContext
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.locks import Rejected

BUSY_SHARE = 0.9
"""A client that uses more than this of a core may be what is measured."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What every kind is given."""

    site: Site
    machine: Machine
    settings: Mapping[str, Any]
    """As they were asked for, to be told beside the result."""
    watch: Watch | None = None


class Meter:
    """What the processes used between `begin` and `end`."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._before: Reading | None = None
        self._after: Reading | None = None

    async def begin(self) -> None:
        self._before = await self._site.read()

    async def end(self) -> None:
        self._after = await self._site.read()

    def result(self, bench: Bench, name: str, client: Client, tally: Tally, series: Sequence[Series]) -> Result:
        assert self._before is not None
        assert self._after is not None
        used = processes(self._before, self._after)
        return Result(
            bench=name,
            settings=bench.settings,
            machine=bench.machine,
            place=self._site.place(client),
            series=tuple(series),
            refused=dict(tally.refused),
            unknown=tally.unknown,
            attempts=tally.attempts,
            processes=used,
            storages=flushes(self._before, self._after),
            windows=tuple(tally.windows),
            notes=tuple(_notes(bench, next(use.cpu_share for use in used if use.name == CLIENT))),
        )


def _notes(bench: Bench, client_share: float) -> list[str]:
    notes = []
    disk = bench.site.disk
    if disk is not None and disk.is_memory:
        notes.append(f"the storages keep their files in memory ({disk.filesystem}): a flush keeps nothing there")
    if client_share > BUSY_SHARE:
        notes.append(f"the client used {100 * client_share:.0f} % of a core: the cluster may be able to do more")
    if bench.machine.load > bench.machine.cores / 2:
        notes.append(f"the machine had a load of {bench.machine.load} before the run: it was not quiet")
    return notes


async def append(bench: Bench, load: Load) -> Result:
    tally, meter = Tally(), Meter(bench.site)
    async with open_client(bench.site, load) as client:
        load = load.on(client.partition_count)
        await Drive(client, load, tally, watch=bench.watch).run(meter.begin)
        await meter.end()
        series = [Series.of("committed", tally.latencies, tally.seconds, load.size)]
        return meter.result(bench, "append", client, tally, series)


# -- beside readers ----------------------------------------------------------------------------------------------------


class Reader:
    """A handler that looks at what it is given, and keeps nothing."""

    def __init__(self, marks: Mapping[int, int]) -> None:
        self._marks = marks
        self.begin()

    def begin(self) -> None:
        """Count from here on."""
        self.latencies = Latencies()
        self.count = self.bytes = 0

    def mark(self, partition: int) -> int:
        return self._marks[partition]

    def apply(self, transaction: Transaction) -> None:
        self.apply_batch([transaction])

    def apply_batch(self, transactions: Sequence[Transaction]) -> None:
        self.count += len(transactions)
        self.bytes += sum([transaction.length for transaction in transactions])
        for transaction in transactions:
            if transaction.header == STAMPED:
                self.latencies.add(time.perf_counter() - stamp_of(transaction.payload))


async def mixed(bench: Bench, load: Load, readers: int, behind: int = 0) -> Result:
    """Every reader follows every partition of the load, from so many transactions (in all) before where it is now."""
    tally, meter = Tally(), Meter(bench.site)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(open_client(bench.site, load))
        load = load.on(client.partition_count)
        marks = {partition: await client.high_water_mark(partition) for partition in range(load.partitions)}
        if behind:
            past = replace(load, producers=8, batch=FILLING, seconds=None, count=behind)
            await Drive(client, past, Tally()).run()
        handlers = [Reader(marks) for _ in range(readers)]
        for handler in handlers:
            await stack.enter_async_context(bench.site.client(range(load.partitions), handler=handler))

        async def counting() -> None:
            await meter.begin()
            for handler in handlers:
                handler.begin()

        await Drive(client, load, tally, watch=bench.watch, stamps=True).run(counting)
        fed = [Series(name="fed", count=h.count, seconds=tally.seconds, bytes=h.bytes) for h in handlers]
        await meter.end()
        seen = Latencies()
        for handler in handlers:
            seen.merge(handler.latencies)
        series = [
            Series.of("committed", tally.latencies, tally.seconds, load.size),
            Series(
                name=f"applied by {readers}",
                count=sum(one.count for one in fed),
                seconds=tally.seconds,
                bytes=sum(one.bytes for one in fed),
                latencies=seen.percentiles(),
                highest=seen.highest,
            ),
        ]
        return meter.result(bench, "mixed", client, tally, series)


# -- against each other ------------------------------------------------------------------------------------------------


class _Contender(TransactionContext):
    """Wants the same locks until it has them, as an application does."""

    def __init__(self, partition: int, payload: bytes, locks: Sequence[Any], tally: Tally) -> None:
        self._partition = partition
        self._payload = payload
        self._locks = locks
        self._tally = tally

    def partition(self, count: int) -> int:
        return self._partition

    def build(self, builder: Builder) -> bool:
        builder.data = self._payload
        builder.locks = list(self._locks)
        return True

    def on_lock_failure(self, outcome: Rejected) -> None:
        self._tally.refused[outcome.reason.name] += 1


class _View:
    """Only its mark matters."""

    def __init__(self, marks: Mapping[int, int]) -> None:
        self._marks = marks

    def mark(self, partition: int) -> int:
        return self._marks[partition]

    def apply(self, transaction: Transaction) -> None:
        pass

    def apply_batch(self, transactions: Sequence[Transaction]) -> None:
        pass


async def locks(bench: Bench, load: Load, clients: int) -> Result:
    """Each client has a view that follows; a transaction that is refused is built again against the newer view."""
    tally, meter = Tally(), Meter(bench.site)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(open_client(bench.site, load))
        load = load.on(first.partition_count)
        marks = {partition: await first.high_water_mark(partition) for partition in range(load.partitions)}
        contenders = [
            await stack.enter_async_context(
                bench.site.client(range(load.partitions), handler=_View(marks), feed=FeedMode.HEADS)
            )
            for _ in range(clients)
        ]
        await _contend(contenders, load, tally, meter, bench.watch)
        await meter.end()
        series = [Series.of("committed", tally.latencies, tally.seconds, load.size)]
        return meter.result(bench, "locks", first, tally, series)


async def _contend(clients: Sequence[Client], load: Load, tally: Tally, meter: Meter, watch: Watch | None) -> None:
    payloads, drawn = Payloads(load.size), Locks(load)
    is_over = False

    async def produce(client: Client, partition: int) -> None:
        while not is_over:
            begun = time.perf_counter()
            context = _Contender(partition, payloads.take(1)[0], drawn.take(1)[0], tally)
            outcome = await client.submit(context)
            if isinstance(outcome, Declined | Rejected):  # its failures are counted already
                continue
            tally.one(outcome, time.perf_counter() - begun)

    async with asyncio.TaskGroup() as producers:
        for number in range(load.producers):
            producers.create_task(produce(clients[number % len(clients)], number % load.partitions))
        await asyncio.sleep(load.warm_up)
        await meter.begin()
        tally.begin(time.perf_counter())
        assert load.seconds is not None
        await _ticking(tally, load.seconds, watch)
        tally.end(time.perf_counter())
        is_over = True


async def _ticking(tally: Tally, seconds: float, watch: Watch | None) -> None:
    begun = time.perf_counter()
    while (passed := time.perf_counter() - begun) < seconds:
        await asyncio.sleep(min(0.25, seconds - passed))
        tally.tick(time.perf_counter())
        if watch is not None:
            watch(tally, passed)
