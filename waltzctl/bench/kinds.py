"""What `waltzctl bench` measures: transactions that go in, alone, beside readers (`mixed`) or against each other (`locks`);
how fast one client reads a log (`feed`); how long writing stands still when an owner goes, and how fast a storage that was
away gets level again (`recovery`, on a cluster of our own, because processes are killed).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from waltzctl.bench.counters import Counters, Latencies
from waltzctl.bench.drive import STAMPED, Drive, Watch, open_client, stamp_of
from waltzctl.bench.load import FILLING, Load
from waltzctl.bench.machine import Machine
from waltzctl.bench.result import Result, Series
from waltzctl.bench.site import CLIENT, Reading, Site, flushes, processes
from waltzctl.picture.picture import Picture
from waltzctl.playground.local import LocalCluster, is_even
from waltzd.client.client import Client
from waltzd.client.view import Builder, Command, Transaction
from waltzd.errors import DaemonSilent, WaltzError
from waltzd.format.record import OVERHEAD_BYTES
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.locks import Declined, Rejected

WRITING = ("append", "mixed", "locks")
"""Kinds that do nothing else, so that what is used can be told of each transaction."""
BUSY_SHARE = 0.9
"""A client that uses more than this of a core may be the bottleneck."""
PATIENCE_SECONDS = 120.0
POLL_SECONDS = 0.05
SETTLE_SECONDS = 1.0


class Bench:
    """For every kind: the cluster, and a meter for what its processes use between `begin` and `end`."""

    def __init__(self, *, site: Site, machine: Machine, settings: Mapping[str, Any], watch: Watch | None = None) -> None:
        """`settings`: of the run, to be shown beside the result."""
        self.site = site
        self.watch = watch
        self.counters = Counters()
        self._machine = machine
        self._settings = settings
        self._before: Reading | None = None
        self._after: Reading | None = None

    async def begin(self) -> None:
        self._before = await self.site.read()

    async def end(self) -> None:
        self._after = await self.site.read()

    def result(self, name: str, client: Client, series: Sequence[Series]) -> Result:
        assert self._before is not None
        assert self._after is not None
        counters = self.counters
        rate = counters.committed / counters.seconds if counters.committed and name in WRITING else 0.0
        used = processes(self._before, self._after, rate=rate)
        return Result(
            bench=name,
            settings=self._settings,
            machine=self._machine,
            place=self.site.place(client),
            series=tuple(series),
            refused=dict(counters.refused),
            unknown=counters.unknown,
            attempts=counters.attempts,
            processes=used,
            storages=flushes(self._before, self._after),
            windows=tuple(counters.windows),
            notes=tuple(self._notes(next(use.cpu_share for use in used if use.name == CLIENT))),
        )

    def committed(self, size: int) -> Series:
        return Series.of("committed", self.counters.latencies, self.counters.seconds, size)

    def _notes(self, client_share: float) -> list[str]:
        notes = []
        disk, machine = self.site.disk, self._machine
        if disk is not None and disk.is_memory:
            notes.append(f"the storages keep their files in memory ({disk.filesystem}): a flush keeps nothing there")
        if client_share > BUSY_SHARE:
            notes.append(f"the client used {100 * client_share:.0f} % of a core: the cluster may be able to do more")
        if machine.load > machine.cores / 2:
            notes.append(f"the machine had a load of {machine.load} before the run: it was not quiet")
        return notes


class Follower:
    """A view that keeps nothing but its position."""

    def __init__(self, marks: Mapping[int, int]) -> None:
        self._marks = marks

    def position(self, partition: int) -> int:
        return self._marks[partition]

    def apply(self, transaction: Transaction) -> None:
        self.apply_batch([transaction])

    def apply_batch(self, transactions: Sequence[Transaction]) -> None:
        pass


async def marks_of(client: Client, partitions: int) -> dict[int, int]:
    return {partition: await client.end_position(partition) for partition in range(partitions)}


# -- alone, and beside readers -----------------------------------------------------------------------------------------


async def append(bench: Bench, load: Load) -> Result:
    async with open_client(bench.site, load) as client:
        load = load.on(client.partition_count)
        await Drive(client, load, bench.counters, watch=bench.watch).run(bench.begin)
        await bench.end()
        return bench.result("append", client, [bench.committed(load.size)])


class Reader(Follower):
    """It measures how late it is given transactions that say when they were handed over."""

    def __init__(self, marks: Mapping[int, int]) -> None:
        super().__init__(marks)
        self.begin()

    def begin(self) -> None:
        """Count from here on."""
        self.latencies = Latencies()
        self.count = self.bytes = 0

    def apply_batch(self, transactions: Sequence[Transaction]) -> None:
        self.count += len(transactions)
        self.bytes += sum([transaction.length for transaction in transactions])
        for transaction in transactions:
            if transaction.header == STAMPED:
                self.latencies.add(time.perf_counter() - stamp_of(transaction.payload))


async def mixed(bench: Bench, load: Load, readers: int, behind: int = 0) -> Result:
    """Every reader follows every partition of the load, from so many transactions (in all) before where it is now."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(open_client(bench.site, load))
        load = load.on(client.partition_count)
        marks = await marks_of(client, load.partitions)
        if behind:
            past = replace(load, producers=8, batch=FILLING, seconds=None, count=behind)
            await Drive(client, past, Counters()).run()
        views = [Reader(marks) for _ in range(readers)]
        for view in views:
            await stack.enter_async_context(bench.site.client(range(load.partitions), view=view))

        async def counting() -> None:
            await bench.begin()
            for view in views:
                view.begin()

        await Drive(client, load, bench.counters, watch=bench.watch, stamps=True).run(counting)
        count, size = sum(view.count for view in views), sum(view.bytes for view in views)
        await bench.end()
        seen = Latencies()
        for view in views:
            seen.merge(view.latencies)
        applied = Series(
            name=f"applied by {readers}",
            count=count,
            seconds=bench.counters.seconds,
            bytes=size,
            latencies=seen.percentiles(),
            highest=seen.highest,
        )
        return bench.result("mixed", client, [bench.committed(load.size), applied])


# -- against each other ------------------------------------------------------------------------------------------------


class _Contender(Command):
    """A transaction that is built again until it has its locks, as an application does it."""

    def __init__(self, partition: int, payload: bytes, locks: Sequence[Any], counters: Counters) -> None:
        self._partition = partition
        self._payload = payload
        self._locks = locks
        self._counters = counters

    def partition(self, count: int) -> int:
        return self._partition

    def build(self, builder: Builder) -> bool:
        builder.payload = self._payload
        builder.locks = list(self._locks)
        return True

    def on_lock_failure(self, outcome: Rejected) -> None:
        self._counters.refused[outcome.reason.name] += 1


class _Contention(Drive):
    """Producers that want the same locks. A refused transaction is built again against the newer view."""

    def __init__(self, clients: Sequence[Client], load: Load, counters: Counters, *, watch: Watch | None) -> None:
        super().__init__(clients[0], load, counters, watch=watch)
        self._clients = clients

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as producers:
            for number in range(self._load.producers):
                client = self._clients[number % len(self._clients)]
                producers.create_task(self._contend(client, number % self._load.partitions))

    async def _contend(self, client: Client, partition: int) -> None:
        while not self._is_over:
            begun = time.perf_counter()
            command = _Contender(partition, self._payloads.take(1)[0], self._locks.take(1)[0], self._counters)
            outcome = await client.submit(command)
            if not isinstance(outcome, Declined | Rejected):  # its failures are counted already
                self._counters.one(outcome, time.perf_counter() - begun)


async def locks(bench: Bench, load: Load, clients: int) -> Result:
    """Each client has a view that follows."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(open_client(bench.site, load))
        load = load.on(first.partition_count)
        marks = await marks_of(first, load.partitions)
        contenders = [
            await stack.enter_async_context(
                bench.site.client(range(load.partitions), view=Follower(marks), feed=FeedMode.HEADS)
            )
            for _ in range(clients)
        ]
        await _Contention(contenders, load, bench.counters, watch=bench.watch).run(bench.begin)
        await bench.end()
        return bench.result("locks", first, [bench.committed(load.size)])


# -- reading -----------------------------------------------------------------------------------------------------------


def tail_bytes(load: Load, partitions: int) -> int:
    """For the owner's memory to hold the newer half of what each partition of the load gets."""
    assert load.count is not None
    half = load.count // load.partitions * (load.size + OVERHEAD_BYTES) // 2
    return max(1 << 20, half * partitions)


class _Passing(Follower):
    """Counts until it has seen so many transactions of every partition."""

    def __init__(self, marks: Mapping[int, int], count: int) -> None:
        super().__init__(marks)
        self._left = dict.fromkeys(marks, count)
        self.bytes = 0
        self.done_at = 0.0
        self.done = asyncio.Event()

    def apply_batch(self, transactions: Sequence[Transaction]) -> None:
        self.bytes += sum([transaction.length for transaction in transactions])
        self._left[transactions[0].partition] -= len(transactions)
        if max(self._left.values()) <= 0 and not self.done.is_set():
            self.done_at = time.perf_counter()
            self.done.set()


async def feed(bench: Bench, load: Load) -> Result:
    """Fill a log, then read its older half, which has left the owner's memory, and its newer half, which has not."""
    async with open_client(bench.site, load) as client:
        load = load.on(client.partition_count)
        first = await marks_of(client, load.partitions)
        await Drive(client, load, bench.counters, watch=bench.watch).run()
        assert load.count is not None
        half = load.count // load.partitions // 2
        middle = {partition: mark + half for partition, mark in first.items()}
        await bench.begin()
        series = []
        for name, marks in (("cold", first), ("hot", middle)):
            for mode in (FeedMode.RECORDS, FeedMode.HEADS):
                series.append(await _read(bench.site, f"{name}, {mode.name.lower()}", marks, half, mode))
        await bench.end()
        return bench.result("feed", client, series)


async def _read(site: Site, name: str, marks: Mapping[int, int], count: int, mode: FeedMode) -> Series:
    """`count` of every partition, behind its mark. The clock runs from before the client is there."""
    view = _Passing(marks, count)
    begun = time.perf_counter()
    async with site.client(list(marks), view=view, feed=mode):
        await view.done.wait()
    return Series(name=name, count=count * len(marks), seconds=view.done_at - begun, bytes=view.bytes)


# -- outages ----------------------------------------------------------------------------------------------------------


class _Writers:
    """A writer for each partition, one transaction at a time. The longest gap between two answers is the stall."""

    def __init__(self, client: Client, partitions: int, payload: bytes) -> None:
        self._client = client
        self._payload = payload
        self._last = dict.fromkeys(range(partitions), 0.0)
        self._begun = dict.fromkeys(range(partitions), 0.0)
        """When the last answered transaction was handed over."""
        self._worst = dict.fromkeys(range(partitions), 0.0)
        self._tasks = [asyncio.create_task(self._write(partition)) for partition in range(partitions)]

    async def _write(self, partition: int) -> None:
        while True:
            begun = time.perf_counter()
            await self._client.append(self._payload, partition=partition)
            now = time.perf_counter()
            gap = now - (self._last[partition] or now)
            self._worst[partition] = max(self._worst[partition], gap)
            self._last[partition], self._begun[partition] = now, begun

    def begin(self) -> None:
        self._worst = dict.fromkeys(self._worst, 0.0)

    async def stall(self) -> float:
        """When every writer has gone on: an answer may still have been on its way when the owner ended."""
        seen = time.perf_counter()
        while any(begun <= seen for begun in self._begun.values()):
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)
        return max(self._worst.values())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def recovery(bench: Bench, load: Load, rounds: int) -> Result:
    cluster = bench.site.local
    assert cluster is not None
    async with open_client(bench.site, load) as client:
        load = load.on(client.partition_count)
        await bench.begin()
        stalls = [
            await _stalls(cluster, client, load, rounds, "owner stopped", signal.SIGTERM),
            await _stalls(cluster, client, load, rounds, "owner killed", signal.SIGKILL),
        ]
        caught_up = await _catch_up(bench, cluster, client, load)
        await bench.end()
        return bench.result("recovery", client, [*stalls, *caught_up])


async def _stalls(
    cluster: LocalCluster, client: Client, load: Load, rounds: int, name: str, number: signal.Signals
) -> Series:
    writers = _Writers(client, load.partitions, b"x" * load.size)
    stalls = Latencies()
    begun = time.perf_counter()
    try:
        for _ in range(rounds):
            await asyncio.sleep(SETTLE_SECONDS)
            writers.begin()
            owner = await _owner(cluster)
            cluster.daemons[owner].send(number)
            await _until("the owner ends", partial(_is_gone, cluster, owner))
            stalls.add(await writers.stall())
            await asyncio.to_thread(cluster.start_one, owner)
            await _settled(cluster)
    finally:
        await writers.close()
    return Series.of(name, stalls, time.perf_counter() - begun, 0)


async def _catch_up(bench: Bench, cluster: LocalCluster, client: Client, load: Load) -> list[Series]:
    """From the moment when the storage says that it is ready."""
    assert load.count is not None
    name = cluster.blueprint.storage_names[0]
    await asyncio.to_thread(cluster.daemons[name].kill)
    await Drive(client, load, bench.counters, watch=bench.watch).run()
    size = bench.counters.committed * (load.size + OVERHEAD_BYTES)
    await asyncio.to_thread(cluster.start_one, name)
    begun = time.perf_counter()
    await _settled(cluster)
    took = time.perf_counter() - begun
    plain = await asyncio.to_thread(_copy_seconds, cluster.directory, size)
    return [
        Series(name="catch-up", count=bench.counters.committed, seconds=took, bytes=size),
        Series(name="plain copy", count=0, seconds=plain, bytes=size),
    ]


def _copy_seconds(directory: Path, size: int) -> float:
    path, piece = directory / "plain-copy", os.urandom(1 << 20)
    begun = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        left = size
        while left > 0:
            left -= file.write(piece[:left])
        os.fdatasync(file.fileno())
    took = time.perf_counter() - begun
    path.unlink()
    return took


async def _owner(cluster: LocalCluster) -> str:
    found = await cluster.picture()
    owner = found.partitions[0].owner
    assert owner is not None
    return owner


async def _is_gone(cluster: LocalCluster, name: str) -> bool:
    return not cluster.daemons[name].is_running


async def _settled(cluster: LocalCluster) -> None:
    """Until every partition is open with all its replicas level, and every server is back with its share: a hand-over would
    cost answers that are on their way."""

    async def is_settled() -> bool:
        try:
            found = await cluster.picture()
        except WaltzError:
            return False
        are_back = len(found.servers) == cluster.blueprint.servers
        return found.is_healthy and are_back and _is_level(found) and is_even(found)

    await _until("the cluster settles", is_settled)


def _is_level(found: Picture) -> bool:
    return all(
        replica.state == "LIVE" for view in found.partitions if view.said is not None for replica in view.said.replicas
    )


async def _until(what: str, true: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not await true():
        if time.monotonic() > deadline:
            raise DaemonSilent(f"{what}: not within {PATIENCE_SECONDS:g} seconds")
        await asyncio.sleep(POLL_SECONDS)
